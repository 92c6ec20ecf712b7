"""What a training on answers that the model writes asks of its spec, its data and its model, and what of it can be known before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hone.base.errors import SpecError
from hone.feed.facts import DataFacts
from hone.model.config import ModelConfig
from hone.train.precision import FP8_RECIPES

T = TypeVar("T")
_KNOWN = (
    "num_params",
    "trained_params",
    "model_bytes",
    "epochs",
    "disk_bytes",
    "checkpoint_bytes",
    "training_state_bytes",
)
"""Figures that do not depend on how long the answers are."""
NOTE = "how long the model's answers will be is not known: time, memory and energy are not estimated"


def check_rollouts(spec: Any, data: Sequence[DataFacts], config: ModelConfig) -> None:
    """Raises SpecError where the train stage `spec` cannot train a model of `config` on its own answers to the prompts of `data`."""
    objective = spec.objective
    if not objective.writes:
        return
    for one in data:
        if one.targets != "trained":
            raise SpecError(
                f"objective '{objective.kind}' answers the prompts of conversations, and {one.where} has none",
                fix="make data of rows with a prompt and the right answer: hone data ROWS --tokenizer.chat=prompt_completion",
            )
    for reward in objective.rewards:
        reward.check()
        for one in data:
            reward.check_tokenizer(one.tokenizer, one.where)
    layout, field = spec.parallelism, "parallelism"
    wrong = {
        "precision": spec.precision in FP8_RECIPES and spec.precision,
        f"{field}.offload": layout.offload.kind != "none" and layout.offload.kind,
        f"{field}.data_parallel": layout.data_parallel.kind not in ("ddp", "zero1", "zero2")
        and layout.data_parallel.kind,
    }
    for name in ("tensor", "context", "pipeline", "expert"):
        degree = getattr(layout, f"{name}_parallel_degree")
        wrong[f"{field}.{name}_parallel_degree"] = degree > 1 and degree
    for name, value in wrong.items():
        if value:
            raise SpecError(
                f"{name} {value} does not train on written answers: each rank's engine needs the whole model, as it is trained",
                fix="take precision: bf16, and ranks that share the batch alone: data_parallel ddp, zero1 or zero2",
            )
    if objective.num_iterations > 1 and spec.optimizer.rewind is not None:
        raise SpecError(
            "objective.num_iterations above 1 keeps answers for later steps, which optimizer.rewind would go back behind",
            fix="leave one of them out",
        )
    from hone.serve.paging.cache import cache_tensors

    cache_tensors(config)  # raises for layers that the engine does not serve


def known(spec: Any, estimates: Mapping[str, T]) -> dict[str, T]:
    """The `estimates` that hold whatever the model writes."""
    return {name: one for name, one in estimates.items() if name in _KNOWN or not spec.objective.writes}
