"""What preferences need of their data and of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.base.errors import SpecError
from hone.feed.facts import DataFacts
from hone.train.objectives.preference.base import Preference

if TYPE_CHECKING:
    from hone.train.objectives.base import Objective
    from hone.train.parallelism import Parallelism


def check_pairs(objective: Objective, data: Sequence[DataFacts], parallelism: Parallelism) -> None:
    """Raises SpecError when pairs meet another objective, or an objective on pairs other data or a layout that divides sequences."""
    wants = isinstance(objective, Preference)
    for one in data:
        if wants and one.targets != "pairs":
            raise SpecError(
                f"objective '{objective.kind}' compares answers, and {one.where} has no pairs of them",
                fix="make data of rows with prompt, chosen and rejected: hone data ROWS --tokenizer.chat=preference",
            )
        if not wants and one.targets == "pairs":
            raise SpecError(
                f"{one.where} has pairs of a chosen and a rejected answer, and objective '{objective.kind}' would learn both",
                fix="give objective: dpo, orpo or simpo, or data of conversations",
            )
    if not wants:
        return
    for name in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
        if getattr(parallelism, name) != 1:
            raise SpecError(
                f"objective '{objective.kind}' needs whole sequences and the whole vocabulary on each rank, not {name} above 1",
                fix=f"leave parallelism.{name} at 1; data-parallel ranks may share the work",
            )
