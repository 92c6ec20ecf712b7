"""The base of context-parallel techniques: how the ranks of an axis attend to sequences of which each holds a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hone.base.errors import SpecError
from hone.base.lazy import resolve
from hone.base.table import Technique
from hone.cost.dims import ModelDims
from hone.cost.ranks import MESSAGE_S, link_bytes_per_s
from hone.parallel.context.chunks import chunk_size

if TYPE_CHECKING:
    from hone.model.config import ModelConfig

READ_BY_CONTEXT = frozenset({"k", "v", "latent"})
"""What mixers keep for later tokens, where these meet them in `Context.attend` alone."""

SCORES = 8
"""Float32 numbers for each pair of query and key that a CPU's heap holds at the peak; measured on two ranks."""


class ContextParallel(Technique):
    """Each rank computes its part of every sequence; only attention needs the others' keys and values.

    Losses and weights are those of one process, up to the rounding of sums in another order: a token's position and its
    document are those in the whole sequence.
    """

    zigzag: ClassVar[bool] = True
    """Whether a rank holds a chunk near the start and one near the end of a sequence, which is equal work for all."""
    overlaps: ClassVar[bool] = False
    """Whether transfers and a layer's work go on side by side; else the layer waits for them."""
    function: ClassVar[str]
    """'module:name' of the attention, with the signature of `hone.parallel.context.ring.ring`."""

    def attention(self) -> Callable[..., Any]:
        """The attention over ranks."""
        return resolve(self.function)

    def check(self, config: ModelConfig, seq_len: int, num_ranks: int) -> None:
        """Raises SpecError when `num_ranks` ranks cannot share sequences of `seq_len` tokens, or the layers of `config`."""
        chunk_size(seq_len, num_ranks, self.zigzag)
        for layer, spec in enumerate(config.layers):
            mixer = spec.mixer
            kept = {one.name for one in mixer.cache()}
            if not (mixer.reuses_kv or (kept and kept <= READ_BY_CONTEXT)):
                raise SpecError(
                    f"mixer '{mixer.kind}' of layer {layer} does not run on parts of a sequence: context parallelism "
                    f"knows attention, sliding_window, shared_kv and mla",
                    fix="set context_parallel_degree to 1, or take one of these mixers",
                )
            self.check_heads(mixer, num_ranks)

    def check_heads(self, mixer: Any, num_ranks: int) -> None:
        """Raises SpecError when `num_ranks` ranks cannot share the heads of `mixer`; by default they need not."""

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """Bytes that a pass holds beside those of one process, while the largest layer computes."""
        raise NotImplementedError

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """(bytes of a forward pass, of a backward pass, messages of both) that a rank receives, over all layers."""
        raise NotImplementedError

    def step_s(self, sizes: Sizes, passes: int, recomputed: int, device: str) -> float:
        """Seconds of the transfers of a step of `passes` micro-batches; `recomputed` layers run forward twice."""
        kind = "cuda" if device.startswith("cuda") else "cpu"
        forward, backward, messages = self.moved(sizes)
        again = 1 + recomputed / max(len(sizes.layers), 1)
        rate = link_bytes_per_s(device, sizes.num_ranks)
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
