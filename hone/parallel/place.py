"""The place of a process among those that run one model: its tensor-parallel rank and its pipeline stage. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hone.base.errors import SpecError


class Place(NamedTuple):
    """Rank `tensor_rank` of the `tensor_size` ranks that share each layer of pipeline stage `stage` of `num_stages`."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    @classmethod
    def of(cls, rank: int, tensor_size: int, num_stages: int) -> Place:
        """The place of process `rank`: neighbours share a stage, as in vLLM."""
        return cls(rank % tensor_size, tensor_size, rank // tensor_size, num_stages)

    @property
    def rank(self) -> int:
        """Its number among all processes."""
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tensor_size * self.num_stages

    @property
    def first(self) -> bool:
        """Whether its stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether its stage makes logits."""
        return self.stage == self.num_stages - 1

    @property
    def peers(self) -> range:
        """The processes of its stage."""
        return range(self.stage * self.tensor_size, (self.stage + 1) * self.tensor_size)

    def __str__(self) -> str:
        stage = f" (stage {self.stage} of {self.num_stages})" if self.num_stages > 1 else ""
        return f"rank {self.rank} of {self.world_size}{stage}"


def stages_of(costs: Sequence[float], num_stages: int, ends: tuple[float, float], joined: set[int]) -> list[range]:
    """The layers of each pipeline stage, such that the stage with the largest cost has as little as possible.

    `costs` are those of each layer (bytes, or operations), `ends` those before the first (embedding) and after the last (head).
    No stage begins at a layer of `joined`: it reads what an earlier one leaves in its own process. Raises SpecError when
    there are fewer places to divide at.
    """
    count = len(costs)
    cuts = [place for place in range(1, count) if place not in joined]
    if len(cuts) < num_stages - 1:
        apart = f", of which {len(joined)} stay with the one before," if joined else ""
        raise SpecError(
            f"{count} layer{'s' if count != 1 else ''}{apart} make{'s' if count == 1 else ''} no {num_stages} pipeline stages",
            fix=f"set pipeline_parallel_size to {len(cuts) + 1} or less",
        )
    before = [ends[0]]
    for one in costs:
        before.append(before[-1] + one)
    before[0], before[-1] = 0.0, before[-1] + ends[1]
    places = [0, *cuts, count]
    # best[s][i]: of s stages that end at places[i] the least largest one, the sum of squares (for equals), the last's begin.
    best = [{0: (0.0, 0.0, -1)}]
    for _ in range(num_stages):
        now: dict[int, tuple[float, float, int]] = {}
        for end in range(1, len(places)):
            way = None
            for begin in range(end - 1, -1, -1):
                own = before[places[end]] - before[places[begin]]
                if way is not None and own > way[0]:  # and so for all that begin earlier
                    break
                if begin in best[-1]:
                    largest, squares, _ = best[-1][begin]
                    one = max(largest, own), squares + own**2, begin
                    way = one if way is None else min(way, one)
            if way is not None:
                now[end] = way
        best.append(now)
    found, end = [], len(places) - 1
    for table in reversed(best[1:]):
        begin = table[end][2]
        found.append(range(places[begin], places[end]))
        end = begin
    return found[::-1]
