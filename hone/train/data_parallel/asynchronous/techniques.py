"""Asynchronous and loosely coupled data parallelism: bulk, stale and not synchronous parameter servers, gossip, and averages of pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.cost.train.replicas import Divided
from hone.train.data_parallel.base import Lossy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hone.base.artifact import Draft
    from hone.train.data_parallel.asynchronous.ad_psgd import PairedTrainer
    from hone.train.data_parallel.asynchronous.gossip import GossipTrainer
    from hone.train.data_parallel.asynchronous.worker import ServedTrainer
    from hone.train.loop import Trainer


class ParameterServer(Lossy):
    """Each rank is a worker and, in a thread, the server of an equal part of the weights: it has the part's optimizer."""

    alone: ClassVar[bool] = True

    @property
    def may_miss(self) -> float:
        """The clocks by which the weights that a worker reads may be behind its own."""
        raise NotImplementedError

    def trainer(self) -> type[ServedTrainer]:  # type: ignore[override]
        """Steps of a worker and of a server."""
        from hone.train.data_parallel.asynchronous.worker import served

        return served(self.meets_every, self.may_miss)

    def record(self, draft: Draft, trainer: Trainer) -> None:
        """The staleness that the clocks have shown."""
        note = f"by which a worker missed gradients of the slowest one, of at most {self.may_miss:g}; since this process began"
        draft.record("staleness", trainer.most_stale, "steps", note=note)  # type: ignore[attr-defined]

    def divided(self, num_ranks: int) -> Divided:
        """As `Lossy.divided`: servers have a part of the optimizer's state and of the masters each, workers all weights."""
        return replace(super().divided(num_ranks), num_shards=num_ranks, sharded=frozenset({"optimizer"}), served=True)


class BSP(ParameterServer):
    """Sharded parameter server; each step waits for the gradients of all workers (bulk synchronous). Li et al. 2014, OSDI; Valiant 1990."""

    paper: ClassVar[str] = "https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu"

    @property
    def may_miss(self) -> float:
        """None."""
        return 0.0


class _Meeting(ParameterServer):
    sync_every: int = Field(
        20,
        ge=1,
        description="Steps between two meetings of all workers: only then they evaluate, save, and end when asked to.",
    )

    @property
    def meets_every(self) -> int:
        """The steps between two meetings."""
        return self.sync_every


class SSP(_Meeting):
    """Sharded parameter server; the slowest worker is at most `staleness` steps behind (stale synchronous). Ho et al. 2013, NIPS."""

    paper: ClassVar[str] = "https://papers.nips.cc/paper/4894"

    staleness: int = Field(
        3, ge=0, description="Steps by which weights may miss gradients of slower workers; 0: none, which is bsp."
    )

    @property
    def may_miss(self) -> float:
        """As asked for."""
        return float(self.staleness)


class ASP(_Meeting):
    """Sharded parameter server; no worker waits between two meetings (asynchronous, Downpour SGD). Dean et al. 2012, NIPS."""

    paper: ClassVar[str] = "https://papers.nips.cc/paper/4687"

    @property
    def may_miss(self) -> float:
        """Any number."""
        return math.inf


class _Neighbours(Lossy):
    alone: ClassVar[bool] = True

    sync_every: int = Field(
        20,
        ge=1,
        description="Steps between two meetings, in which the weights of all ranks are averaged (Gossip-PGA): only then they evaluate, save, and end when asked to.",
    )

    @property
    def meets_every(self) -> int:
        """The steps between two meetings."""
        return self.sync_every


class Gossip(_Neighbours):
    """Every rank mixes its weights with its neighbours' in each step, with its own optimizer state (D-PSGD). Lian et al. 2017, arXiv:1705.09056."""

    paper: ClassVar[str] = "arXiv:1705.09056"

    topology: Literal["ring", "exponential"] = Field(
        "ring",
        description="Neighbours: ring, both, a third each; exponential, one, 1, 2, 4, ... ranks away in turn, a half.",
    )

    def trainer(self) -> type[GossipTrainer]:  # type: ignore[override]
        """Steps of one rank that mix."""
        from hone.train.data_parallel.asynchronous import topology
        from hone.train.data_parallel.asynchronous.gossip import gossiping

        return gossiping(self.sync_every, {"ring": topology.ring, "exponential": topology.exponential}[self.topology])

    def divided(self, num_ranks: int) -> Divided:
        """As `Lossy.divided`: each rank keeps the last common weights, those it sends and those of its neighbours, in float32."""
        peers = 1 if self.topology == "exponential" or num_ranks == 2 else 2
        # In turn they come from several ranks: each has its own room.
        rooms = (num_ranks - 1).bit_length() if self.topology == "exponential" else peers
        return replace(super().divided(num_ranks), every=self.sync_every, peers=peers, kept_bytes=4.0 * (2 + rooms))


class ADPSGD(_Neighbours):
    """Every rank averages its weights with one random neighbour's at a time, beside its passes, and waits for no other rank's passes (AD-PSGD). Lian et al. 2018, arXiv:1710.06952."""

    paper: ClassVar[str] = "arXiv:1710.06952"

    topology: Literal["ring", "complete"] = Field(
        "ring",
        description="Neighbours that an even rank, which asks, draws one of: ring, the two beside it; complete, all odd ones.",
    )

    def trainer(self) -> type[PairedTrainer]:  # type: ignore[override]
        """Steps of one rank beside averages."""
        from hone.train.data_parallel.asynchronous.ad_psgd import paired

        return paired(self.sync_every, self._neighbours)

    @property
    def _neighbours(self) -> Callable[[int, int], tuple[int, ...]]:
        from hone.train.data_parallel.asynchronous import topology

        return {"ring": topology.ring_of_two_sides, "complete": topology.every_other}[self.topology]

    def divided(self, num_ranks: int) -> Divided:
        """As `Lossy.divided`: each rank keeps the last common weights and those that are averaged, an odd one room for each neighbour's, in float32."""
        rooms = max(len(self._neighbours(rank, num_ranks)) for rank in range(1, num_ranks, 2))
        more = {"every": self.sync_every, "peers": 1, "answered": True, "kept_bytes": 4.0 * (2 + rooms)}
        return replace(super().divided(num_ranks), **more)
