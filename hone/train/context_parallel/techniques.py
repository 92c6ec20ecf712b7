"""The context-parallel techniques: keys go around a ring, to all ranks, or heads are exchanged for tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from hone.cost.train.context import AllGatherSharing, RingSharing, Sharing, UlyssesSharing
from hone.parallel.context.chunks import check_heads
from hone.train.context_parallel.base import ContextParallel


class Ring(ContextParallel):
    """Blocks of keys and values go around the ranks while they compute; a rank never holds a whole sequence. Liu et al. 2023, arXiv:2310.01889; zigzag order: Brandon et al. 2023, arXiv:2311.09431."""

    paper: ClassVar[str] = "arXiv:2310.01889"
    sharing: ClassVar[type[Sharing]] = RingSharing
    function: ClassVar[str] = "hone.parallel.context.ring:ring"


class AllGather(ContextParallel):
    """Every rank gets all keys and values of a layer while it computes: one exchange, cheap with few key heads. Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2."""

    paper: ClassVar[str] = "arXiv:2407.21783"
    sharing: ClassVar[type[Sharing]] = AllGatherSharing
    function: ClassVar[str] = "hone.parallel.context.all_gather:all_gather"


class Ulysses(ContextParallel):
    """An exchange turns parts of sequences with all heads into whole sequences with a part of the heads, and back: the least traffic; ranks must divide the heads. Jacobs et al. 2023, arXiv:2309.14509."""

    paper: ClassVar[str] = "arXiv:2309.14509"
    sharing: ClassVar[type[Sharing]] = UlyssesSharing
    function: ClassVar[str] = "hone.parallel.context.ulysses:ulysses"

    def check_heads(self, mixer: Any, num_ranks: int) -> None:
        check_heads(mixer.num_heads, getattr(mixer, "num_kv_heads", mixer.num_heads), num_ranks)
