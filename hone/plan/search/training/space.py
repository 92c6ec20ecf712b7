"""The configurations of a training: its axes, their values for a model on a machine, and what cannot be combined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.base.errors import HoneError
from hone.cost.ranks import HOST_GPUS
from hone.plan.search.goal import Goal
from hone.plan.search.machines import Fleet, precisions_of
from hone.plan.search.product import Columns, Lookup, Product, kept
from hone.plan.search.shapes import Candidate

if TYPE_CHECKING:
    from hone.train.parallelism import Parallelism

CONTEXT_TOKENS = 4096
"""Tokens of a sequence that a rank of context parallelism has at least: below, messages outlast attention."""

TOKENS_A_PARAMETER = 20
"""Training tokens of a goal that names none: Hoffmann et al. 2022, arXiv:2203.15556."""

SHARDED = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class Trainings:
    """All ways to train `candidate` on `fleet` for `goal`."""

    goal: Goal
    candidate: Candidate
    fleet: Fleet

    @cached_property
    def product(self) -> Product:
        """The axes in the order in which they are walked."""
        goal, space, fleet = self.goal, self.goal.space, self.fleet
        count, layers = fleet.count, self.candidate.dims.num_layers
        host = min(count, HOST_GPUS) if fleet.on_gpu else count
        stages = space.pipeline_parallel or [one for one in _divisors(count) if one <= layers]
        shares = space.context_parallel or [
            one for one in _powers(count) if goal.seq_len // one >= CONTEXT_TOKENS or one == 1
        ]
        most = max(goal.batch_size)
        return Product(
            {
                "batch_size": goal.batch_size,
                "tokens": goal.tokens or (float(TOKENS_A_PARAMETER * self.candidate.dims.active_params),),
                "tensor": space.tensor_parallel or _powers(host),
                "stages": stages,
                "context": shares,
                "experts": self._expert_ranks(),
                "sharding": space.data_parallel if count > 1 else ("ddp",),
                "schedule": self._schedules(),
                "micro_batch": space.micro_batch or _powers(min(most, 64)),
                "recomputation": tuple(one for one in space.recomputation if one != "layers"),
                "precision": space.precision or precisions_of(fleet),
            }
        )

    def _schedules(self) -> tuple[tuple[str, int], ...]:
        """(kind, stages a rank) of each schedule."""
        space, found = self.goal.space, []
        for kind in space.schedules:
            found += [(kind, v) for v in space.stages_per_rank] if kind == "interleaved" else [(kind, 1)]
        return tuple(found) if self.fleet.count > 1 else (("1f1b", 1),)

    def _expert_ranks(self) -> tuple[int, ...]:
        """Ranks that divide the experts: divisors of their number, within a host."""
        numbers = {getattr(one.feed_forward, "num_experts", 0) for one in self.candidate.config.layers} - {0}
        if not numbers:
            return (1,)
        return tuple(one for one in _powers(min(self.fleet.count, HOST_GPUS)) if all(n % one == 0 for n in numbers))

    def blocks(self, rejected: Counter[str]) -> Iterator[Columns]:
        """Blocks of configurations that can be combined, with columns `data` (ranks that share the batch) and `passes`.

        Others are counted in `rejected` by reason.
        """
        product, count = self.product, self.fleet.count
        for block in product.blocks():
            block = self._filtered(block, count, rejected)
            if len(block["tensor"]):
                yield block

    def _filtered(self, block: Columns, count: int, rejected: Counter[str]) -> Columns:
        product, dims = self.product, self.candidate.dims

        def drop(reason: str, bad: Any) -> None:
            nonlocal block
            rejected[reason] += int(bad.sum())
            block = kept(block, ~bad)

        def column(name: str) -> Any:
            return product.column(block, name)

        taken = column("tensor") * column("stages") * column("context") * column("experts")
        drop("the degrees do not divide the ranks", (count % taken != 0) | (taken > count))
        taken = column("tensor") * column("stages") * column("context")
        block["data"] = count // taken  # with the ranks that divide experts
        drop(
            "batch_size is not divisible by ranks x micro-batch",
            column("batch_size") % (block["data"] * column("micro_batch")) != 0,
        )
        block["passes"] = column("batch_size") // (block["data"] * column("micro_batch"))
        kinds = np.array([SHARDED[one] for one in product.axes["sharding"]])[block["sharding"]]
        drop("zero2 and zero3 work without pipeline stages", (column("stages") > 1) & (kinds > 1))
        kinds = np.array([SHARDED[one] for one in product.axes["sharding"]])[block["sharding"]]
        drop("one data-parallel rank shares nothing", (block["data"] * column("context") == 1) & (kinds > 0))
        chunks = np.array([v for _, v in product.axes["schedule"]])[block["schedule"]]
        first = block["schedule"] == 0
        drop("a schedule needs pipeline stages", (column("stages") == 1) & ~first)
        chunks = np.array([v for _, v in product.axes["schedule"]])[block["schedule"]]
        drop("fewer layers than stages", column("stages") * chunks > dims.num_layers)
        strict = np.array([kind != "1f1b" for kind, _ in product.axes["schedule"]])[block["schedule"]]
        drop(
            "interleaved and zb_h1 need as many micro-batches as stages", strict & (block["passes"] < column("stages"))
        )
        if "selective" in product.axes["recomputation"]:
            selective = np.array([one == "selective" for one in product.axes["recomputation"]])[block["recomputation"]]
            drop("selective recomputation works without pipeline stages", selective & (column("stages") > 1))
        for reason, bad in self._refused(block):
            rejected[reason] += int(bad.sum())
        return kept(block, ~self._any_refused(block))

    def _refused(self, block: Columns) -> Iterator[tuple[str, Any]]:
        """What hone itself refuses of the layouts: heads, experts, sequences, by its own message."""
        (numbers,) = self._laid(*(block[name] for name in ("tensor", "stages", "context", "experts", "sharding")))
        for number in np.unique(numbers[numbers > 0]).astype(int):
            yield self.reasons[number - 1], numbers == number

    def _any_refused(self, block: Columns) -> Any:
        (numbers,) = self._laid(*(block[name] for name in ("tensor", "stages", "context", "experts", "sharding")))
        return numbers > 0

    @cached_property
    def reasons(self) -> list[str]:
        """Messages of layouts that hone refuses."""
        return []

    @cached_property
    def _laid(self) -> Lookup:
        """0 where a layout can be, else the number of its reason from 1 on."""

        def check(*places: int) -> tuple[float]:
            try:
                found = self.parallelism(*places)
                found = found.model_copy(update={"pipeline_parallel_degree": 1})  # layers were counted before
                found.check(self.candidate.config, seq_len=self.goal.seq_len)
                if found.context_parallel_degree > 1:
                    found.check_sequences(self.candidate.config, self.goal.seq_len)
                self.parallelism(*places).divided(self.fleet.count)
            except HoneError as error:
                said = error.what.partition(":")[0] if len(error.what) > 90 else error.what
                if said not in self.reasons:
                    self.reasons.append(said)
                return (1.0 + self.reasons.index(said),)
            return (0.0,)

        return Lookup(check, 1)

    def parallelism(self, tensor: int, stages: int, context: int, experts: int, sharding: int) -> Parallelism:
        """The layout at places of the axes, without its schedule. Raises SpecError where it cannot be."""
        from hone.train.parallelism import Parallelism

        axes = self.product.axes
        return Parallelism.read(
            {
                "data_parallel": axes["sharding"][sharding],
                "tensor_parallel_degree": axes["tensor"][tensor],
                "pipeline_parallel_degree": axes["stages"][stages],
                "context_parallel_degree": axes["context"][context],
                "expert_parallel_degree": axes["experts"][experts],
            }
        )


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(max(most, 1).bit_length())]


def _divisors(count: int) -> list[int]:
    return [one for one in range(1, count + 1) if count % one == 0]
