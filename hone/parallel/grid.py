"""The grid of the ranks of a training: an axis for each way in which they share the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from hone.base.ranks import Mesh
from hone.parallel.axis import Axis
from hone.parallel.degrees import Degrees
from hone.parallel.experts import RowExchange
from hone.parallel.overlap import Exchange, exchange_of
from hone.parallel.row_copies import exchange_of as row_exchange_of


class Copies(NamedTuple):
    """The ranks that hold a weight: those of `shard` each hold a part of its state, those of `replicate` the same part.

    Its gradient is the sum over all of them.
    """

    replicate: Axis
    shard: Axis


class Grid:
    """The axes of this rank in a training on `degrees` ranks; every rank makes it at the same time.

    `pp`, `dp_replicate`, `dp_shard`, `ep`, `cp` and `tp` are the axes of `Degrees`. Context- and expert-parallel ranks hold the same
    weights, so for weights they are data-parallel ranks: they share the state with the group (`shards`), or replicate it. `copies` are
    the ranks of weights that each tensor-parallel rank has a part of (this one only where each trains `alone`), `tensor_copies` those
    of weights that all of them have, `expert_copies` those of the experts of which each expert-parallel rank has a part.
    """

    def __init__(
        self,
        mesh: Mesh,
        degrees: Degrees,
        device: torch.device | str = "cpu",
        *,
        shards: bool = False,
        alone: bool = False,
    ) -> None:
        assert degrees.num_ranks == mesh.world_size, f"{degrees} for {mesh.world_size} ranks"
        self.mesh, self.degrees, self.device = mesh, degrees, device
        self.place = degrees.place(mesh.rank)
        self._made: dict[tuple[tuple[int, ...], ...], Axis] = {}
        self.pp, self.dp_replicate, self.dp_shard, self.ep, self.cp, self.tp = map(self.axis, Degrees._fields)
        replicate, shard = ("dp_replicate",), ("dp_shard",)
        replicate, shard = (replicate, (*shard, "ep", "cp")) if shards else ((*replicate, "ep", "cp"), shard)
        if alone:
            replicate, shard = (), ()
        self._replicate, self._shard = replicate, shard
        self.copies = Copies(self.axis(*replicate), self.axis(*shard))
        self.tensor_copies = Copies(self.axis(*replicate, "tp"), self.axis(*shard))
        self.expert_copies = Copies(*(self.axis(*(one for one in axes if one != "ep")) for axes in (replicate, shard)))
        self._shared: dict[str, tuple[Copies, Copies]] = {}
        self.expert_rows: Axis | None = None
        """The axis `ep` on which rows of experts travel; None: `expert_exchange` was not called."""

    def axis(self, *names: str) -> Axis:
        """The ranks that differ from this one along the axes `names` alone. Every rank calls it in the same order."""
        return self._axis(self.degrees.lines(names))

    def split(self, inner: int) -> tuple[Axis, Axis]:
        """The ranks of `copies.shard` in groups of `inner` neighbours: this rank's group, and those in its place in each of them.

        Every rank calls it at the same time.
        """
        lines = self.degrees.lines(self._shard)
        near = [line[at : at + inner] for line in lines for at in range(0, len(line), inner)]
        return self._axis(near), self._axis([line[at::inner] for line in lines for at in range(inner)])

    @cached_property
    def exchange(self) -> Exchange:
        """The transfers of the tensor-parallel ranks beside products; they all ask for it at the same time."""
        found = exchange_of(self.tp, self.device)
        self.mesh.at_close(found.close)
        return found

    def expert_exchange(self, backend: str) -> RowExchange:
        """The transfers of the rows of expert-parallel ranks by `backend`; they all ask for it at the same time. Raises SpecError as `exchange_of`."""
        # On connections of their own: a layer waits for its rows, which must not wait behind gradients of the layer before.
        self.expert_rows = self._line(self.degrees.lines(["ep"]))
        found, close = row_exchange_of(self.expert_rows, self.device, backend)
        self.mesh.at_close(close)
        return found

    @property
    def sent(self) -> Counter[str]:
        """As `Axis.sent`, of all axes."""
        every = [*self._made.values(), *([] if self.expert_rows is None else [self.expert_rows])]
        return sum((axis.sent for axis in every), Counter())

    def share(self, names: Iterable[str], stages: Collection[int]) -> None:
        """Weights `names` are held by the pipeline ranks `stages` together. Every rank calls it in the same order."""
        made = []
        for axes in (self._replicate, (*self._replicate, "tp")):
            lines = []
            for line in self.degrees.lines(("pp", *axes)):
                alone = [
                    [rank for rank in line if self.degrees.place(rank).pp == stage] for stage in range(self.degrees.pp)
                ]
                together = [rank for stage in sorted(stages) for rank in alone[stage]]
                lines += [together, *(ranks for stage, ranks in enumerate(alone) if stage not in stages)]
            made.append(Copies(self._axis(lines), self.copies.shard))
        for name in names:
            self._shared[name] = (made[0], made[1])

    def divide_experts(self, names: Iterable[str]) -> None:
        """Of the weights `names` each expert-parallel rank has a part."""
        self._shared |= dict.fromkeys(names, (self.expert_copies, self.expert_copies))

    def copies_of(self, name: str, on_all: bool) -> Copies:
        """The ranks that hold weight `name`; `on_all`: all tensor-parallel ranks do."""
        return self._shared.get(name, (self.copies, self.tensor_copies))[on_all]

    def _axis(self, lines: Sequence[Sequence[int]]) -> Axis:
        """This rank's line of `lines`."""
        key = tuple(map(tuple, lines))
        if key not in self._made:
            self._made[key] = self._line(lines)
        return self._made[key]

    def _line(self, lines: Sequence[Sequence[int]]) -> Axis:
        """This rank's line of `lines`, with connections that no other axis has."""
        line = next(one for one in lines if self.mesh.rank in one)
        return Axis(line, self.mesh.rank, self.mesh.group(lines, self.device), self.mesh.broken, self.mesh.waits)

    @property
    def data_index(self) -> int:
        """Which of the `degrees.dp` parts of a batch this rank reads."""
        return (self.dp_replicate.index * self.dp_shard.size + self.dp_shard.index) * self.ep.size + self.ep.index

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is a part of the whole: the other tensor-parallel ranks compute the same one."""
        return self.tp.index == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's tokens and targets are counted: other stages and tensor-parallel ranks read the same ones."""
        return self.counts_loss and self.pp.index == 0
