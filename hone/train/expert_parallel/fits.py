"""With what divided experts do not work: what a training says of it before it starts."""

from __future__ import annotations

from typing import Any

from hone.base.errors import SpecError


def check_fields(parallelism: Any) -> None:
    """Raises ValueError where the experts of `parallelism`, a `Parallelism`, are divided beside what does not work with that."""
    degree = parallelism.expert_parallel_degree
    if degree == 1:
        if parallelism.expert_parallel_comm_backend != "standard":
            raise ValueError("expert_parallel_comm_backend has no rows to bring with expert_parallel_degree 1")
        return
    if isinstance(getattr(parallelism.data_parallel, "reshard_after_forward", ""), int):
        raise ValueError(
            "expert_parallel_degree works with reshard_after_forward default, always or never: experts have fewer copies than "
            "other weights, which a number of neighbours does not say"
        )


def check_stacks(divided: bool, parallelism: Any, optimizer: Any) -> None:
    """Raises SpecError where tensor-parallel ranks of `parallelism` divide each expert (`divided`: there are some) beside an `optimizer` that keeps
    states of whole stacks of them."""
    if divided and parallelism.tensor_parallel_degree > 1 and not optimizer.divides_stacks:
        raise SpecError(
            f"optimizer {optimizer.kind} keeps states of whole stacks of experts, of which tensor-parallel ranks have parts",
            fix="take optimizer adamw or muon, or set parallelism.tensor_parallel_degree to 1",
        )


def check_training(degree: int, optimizer: Any, *, rerun: bool) -> None:
    """Raises ValueError where experts that `degree` ranks divide do not work with `optimizer`, an `Optimizer`, or with steps that another rank
    computes again (`rerun`)."""
    if degree == 1:
        return
    if not optimizer.divides_stacks:
        raise ValueError(
            f"optimizer {optimizer.kind} keeps states of whole stacks of experts: take another one, or expert_parallel_degree 1"
        )
    if rerun:
        raise ValueError(
            "check.rerun_interval compares gradients of the same experts on two ranks, which with expert_parallel_degree "
            f"{degree} have different ones: set one of them to its default"
        )
