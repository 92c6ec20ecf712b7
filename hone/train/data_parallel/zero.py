"""ZeRO: the ranks of a group share optimizer state, then gradients, then weights among them."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.train.data_parallel.base import Sharded
from hone.train.data_parallel.moves import RESHARD, Moves, ReshardAfterForward, within


class Zero1(Sharded):
    """Each rank updates its part of the weights and holds the optimizer state and float32 masters of that part. Rajbhandari et al. 2019, arXiv:1910.02054."""

    paper: ClassVar[str] = "arXiv:1910.02054"
    sharded: ClassVar[frozenset[str]] = frozenset({"optimizer"})


class Zero2(Sharded):
    """As zero1; a rank also keeps only its part of the summed gradient, of every micro-batch. Rajbhandari et al. 2019, arXiv:1910.02054."""

    paper: ClassVar[str] = "arXiv:1910.02054"
    sharded: ClassVar[frozenset[str]] = frozenset({"optimizer", "gradients"})


class Zero3(Sharded):
    """As zero2; a layer's weights are gathered before its passes and freed after them (FSDP). Embedding and head stay whole. Rajbhandari et al. 2019, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277."""

    paper: ClassVar[str] = "arXiv:2304.11277"
    sharded: ClassVar[frozenset[str]] = frozenset({"optimizer", "gradients", "weights"})

    reshard_after_forward: ReshardAfterForward = Field("default", description=RESHARD)

    def moves(self, num_shards: int) -> Moves:
        """As `DataParallel.moves`."""
        return Moves(within(self.reshard_after_forward, num_shards))
