"""The context-parallel techniques: keys go around a ring, to all ranks, or heads are exchanged for tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from hone.parallel.context.chunks import check_heads
from hone.train.context_parallel.base import ContextParallel, Sizes


class Ring(ContextParallel):
    """Blocks of keys and values go around the ranks while they compute; a rank never holds a whole sequence. Liu et al. 2023, arXiv:2310.01889; zigzag order: Brandon et al. 2023, arXiv:2311.09431."""

    paper: ClassVar[str] = "arXiv:2310.01889"
    overlaps: ClassVar[bool] = True
    function: ClassVar[str] = "hone.parallel.context.ring:ring"

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """Two blocks of keys and values, their float32 gradients twice, and float32 gradients of the queries."""
        held = max(sizes.tokens * (2 * one.keys * (sizes.width + 4) + 4 * one.queries) for one in sizes.layers)
        return held + sizes.score_bytes(device, sizes.seq_len / sizes.num_ranks)

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """Every other rank's block in each direction, and as many float32 gradients as ranks."""
        others, keys = sizes.num_ranks - 1, sizes.tokens * sum(one.keys for one in sizes.layers)
        block = others * keys * sizes.width
        return block, block + 4 * sizes.num_ranks * keys, len(sizes.layers) * (2 * others + sizes.num_ranks)


class AllGather(ContextParallel):
    """Every rank gets all keys and values of a layer while it computes: one exchange, cheap with few key heads. Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2."""

    paper: ClassVar[str] = "arXiv:2407.21783"
    function: ClassVar[str] = "hone.parallel.context.all_gather:all_gather"

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """Keys and values of the whole sequences, as received and in order, and as many float32 gradients."""
        held = max(sizes.num_ranks * sizes.tokens * 2 * one.keys * (sizes.width + 4) for one in sizes.layers)
        return held + sizes.score_bytes(device, sizes.seq_len / 2)  # one chunk of queries at a time

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """Every other rank's keys and values in each direction, and float32 gradients of as many."""
        keys = (sizes.num_ranks - 1) * sizes.tokens * sum(one.keys for one in sizes.layers)
        return keys * sizes.width, keys * (sizes.width + 4), 6 * len(sizes.layers)


class Ulysses(ContextParallel):
    """An exchange turns parts of sequences with all heads into whole sequences with a part of the heads, and back: the least traffic; ranks must divide the heads. Jacobs et al. 2023, arXiv:2309.14509."""

    paper: ClassVar[str] = "arXiv:2309.14509"
    zigzag: ClassVar[bool] = False
    function: ClassVar[str] = "hone.parallel.context.ulysses:ulysses"

    def check_heads(self, mixer: Any, num_ranks: int) -> None:
        check_heads(mixer.num_heads, getattr(mixer, "num_kv_heads", mixer.num_heads), num_ranks)

    def kept_bytes(self, sizes: Sizes, device: str) -> float:
        """What is sent and what is received of queries, keys and values."""
        return max(2 * sizes.tokens * sizes.width * (one.queries + keys) for one, keys in self._sent(sizes))

    def moved(self, sizes: Sizes) -> tuple[float, float, int]:
        """Queries, keys, values and results once in each direction, without the part that stays."""
        each = sum(2 * one.queries + keys for one, keys in self._sent(sizes))
        moved = sizes.tokens * sizes.width * each * (sizes.num_ranks - 1) / sizes.num_ranks
        return moved, moved, 8 * len(sizes.layers)

    def _sent(self, sizes: Sizes) -> list[tuple[Any, int]]:
        """Each layer, and the numbers a token of its keys and values with copies for ranks that share a head."""
        return [(one, one.keys * max(1, sizes.num_ranks // one.num_kv_heads)) for one in sizes.layers]
