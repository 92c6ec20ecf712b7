"""Cost of context parallelism: what ranks that share sequences send each other and hold, by the way in which they attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from hone.cost.dims import ModelDims
from hone.cost.ranks import MESSAGE_S, link_bytes_per_s

SCORES = 8
"""Float32 numbers for each pair of query and key that a CPU's heap holds at the peak; measured on two ranks."""


@dataclass(frozen=True)
class Sharing:
    """A way of `kind` in which ranks attend to sequences of which each holds a part."""

    kind: str
    zigzag: ClassVar[bool] = True
    """Whether a rank holds a chunk near the start and one near the end of a sequence, which is equal work for all."""
    overlaps: ClassVar[bool] = False
    """Whether transfers and a layer's work go on side by side; else the layer waits for them."""

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """Bytes that a pass holds beside those of one process, while the largest layer computes."""
        raise NotImplementedError

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """(bytes of a forward pass, of a backward pass, messages of both) that a rank receives, over all layers."""
        raise NotImplementedError

    def step_s(self, sizes: Sizes, passes: int, recomputed: int, device: str, processor: str = "") -> float:
        """Seconds of the transfers of a step of `passes` micro-batches; `recomputed` layers run forward twice."""
        kind = "cuda" if device.startswith("cuda") else "cpu"
        forward, backward, messages = self.moved(sizes)
        again = 1 + recomputed / max(len(sizes.layers), 1)
        rate = link_bytes_per_s(device, sizes.num_ranks, processor)
        return passes * ((forward * again + backward) / rate + messages * MESSAGE_S[kind])


class Attended(NamedTuple):
    """Numbers a token of a layer's queries, and of its keys and values as they are sent; heads of both."""

    queries: int
    keys: int
    num_heads: int
    num_kv_heads: int


class Sizes(NamedTuple):
    """A pass of `num_ranks` ranks with `tokens` tokens each, of sequences of `seq_len`, in numbers of `width` bytes."""

    layers: tuple[Attended, ...]
    tokens: int
    seq_len: int
    num_ranks: int
    width: int

    def score_bytes(self, device: str, keys: float) -> float:
        """Bytes of float32 scores for each query and `keys` keys, which all but a GPU's kernels for 16 bits store."""
        if device.startswith("cuda") and self.width < 4:
            return 0.0
        return SCORES * 4 * self.tokens * keys * max(one.num_heads for one in self.layers)

    @classmethod
    def of(cls, dims: ModelDims, tokens: int, seq_len: int, num_ranks: int, width: int) -> Sizes:
        """The sizes of a model's pass."""
        layers: list[Attended] = []
        for layer in dims.layers:
            num_heads = getattr(layer.mixing, "num_heads", 1)
            kept = {one.name: one for one in layer.cache}
            if "latent" in kept:  # keys and values of every head are made of it before they are sent
                queries, keys, num_kv_heads = layer.widths.turned // 2, 0, num_heads
                keys = queries + layer.widths.mixed
            elif kept:
                queries, keys = layer.widths.mixed, sum(one.num_values for one in kept.values())
                num_kv_heads = layer.cache[0].shape[0]
            else:  # the keys of an earlier layer
                queries, keys, num_kv_heads = layer.widths.mixed, layers[-1].keys, layers[-1].num_kv_heads
            layers.append(Attended(queries, keys, num_heads, num_kv_heads))
        return cls(tuple(layers), tokens, seq_len, num_ranks, width)


class RingSharing(Sharing):
    """Keys and values go around the ranks while they compute."""

    overlaps: ClassVar[bool] = True

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """Two blocks of keys and values, their float32 gradients twice, and float32 gradients of the queries."""
        held = max(sizes.tokens * (2 * one.keys * (sizes.width + 4) + 4 * one.queries) for one in sizes.layers)
        return held + sizes.score_bytes(device, sizes.seq_len / sizes.num_ranks)

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """Every other rank's block in each direction, and as many float32 gradients as ranks."""
        others, keys = sizes.num_ranks - 1, sizes.tokens * sum(one.keys for one in sizes.layers)
        block = others * keys * sizes.width
        return block, block + 4 * sizes.num_ranks * keys, len(sizes.layers) * (2 * others + sizes.num_ranks)


class AllGatherSharing(Sharing):
    """Every rank gets all keys and values of a layer."""

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """Keys and values of the whole sequences, as received and in order, and as many float32 gradients."""
        held = max(sizes.num_ranks * sizes.tokens * 2 * one.keys * (sizes.width + 4) for one in sizes.layers)
        return held + sizes.score_bytes(device, sizes.seq_len / 2)  # one chunk of queries at a time

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """Every other rank's keys and values in each direction, and float32 gradients of as many."""
        keys = (sizes.num_ranks - 1) * sizes.tokens * sum(one.keys for one in sizes.layers)
        return keys * sizes.width, keys * (sizes.width + 4), 6 * len(sizes.layers)


class UlyssesSharing(Sharing):
    """Parts of sequences with all heads become whole sequences with a part of the heads, and back."""

    zigzag: ClassVar[bool] = False

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """What is sent and what is received of queries, keys and values."""
        return max(2 * sizes.tokens * sizes.width * (one.queries + keys) for one, keys in self._sent(sizes))

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """Queries, keys, values and results once in each direction, without the part that stays."""
        each = sum(2 * one.queries + keys for one, keys in self._sent(sizes))
        moved = sizes.tokens * sizes.width * each * (sizes.num_ranks - 1) / sizes.num_ranks
        return moved, moved, 8 * len(sizes.layers)

    def _sent(self, sizes: Sizes) -> list[tuple[Attended, int]]:
        """Each layer, and the numbers a token of its keys and values with copies for ranks that share a head."""
        return [(one, one.keys * max(1, sizes.num_ranks // one.num_kv_heads)) for one in sizes.layers]
