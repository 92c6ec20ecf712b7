"""Ways out of a training's want of memory: what a plan proposes, and what the error of one that has begun says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.base.errors import FitError
from hone.base.plan import MEMORY

WAYS = {
    MEMORY: ("use a smaller model", "train where more memory is free"),
}
"""Ways out when memory is too small, besides `remedies`."""


def remedies(spec: Any) -> list[list[tuple[str, str]]]:
    """Changes of the training `spec` that may need less memory; see `Stage.remedies`."""
    batch, now = spec.batch_size, spec.gradient_accumulation_steps
    return [
        [("gradient_accumulation_steps", str(count)) for count in range(now + 1, batch + 1) if batch % count == 0],
        # With full no other one needs less.
        [
            ("activation_checkpointing", kind)
            for kind in ("memory_budget", "full")
            if spec.activation_checkpointing.kind != "full"
        ],
        [("optimizer", "adamw_8bit")],
        [("parallelism.offload", "host")],
        [("seq_len", str(spec.seq_len // part)) for part in (2, 4, 8) if spec.seq_len // part >= SHORTEST],
    ]


def on_ranks(spec: Any, num_ranks: int) -> Iterator[dict[str, str]]:
    """Changes of the training `spec` with which `num_ranks` ranks share it; see `Stage.on_ranks`.

    The state is divided over all ranks (zero3), alone and with layers that 2, 4 or 8 ranks compute together; each pass of a rank is as
    small as its share of the batch allows.
    """
    for degree in (1, 2, 4, 8):
        copies = num_ranks // degree
        if num_ranks % degree or spec.batch_size % copies:
            continue
        changes = {"parallelism.tensor_parallel_degree": str(degree)} if degree > 1 else {}
        if copies > 1:
            changes["parallelism.data_parallel"] = "zero3"
        yield {**changes, "gradient_accumulation_steps": str(spec.batch_size // copies)}


SHORTEST = 64
"""Tokens of the shortest sequences that are proposed."""


def out_of_memory(error: BaseException, device: str, step: int, spec: Any) -> FitError | None:
    """The error for the user when `error` of step `step` of the training `spec` is one of torch's several out-of-memory errors; else None.

    Its ways out are the mildest changes of fields that are not set so already: the plan, which had expected it to fit, cannot try them.
    """
    if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
        return None
    fields = [f"set {name}: {value}" for (name, value), *_ in filter(None, remedies(spec))]
    ways = "; or ".join((*fields[:2], *WAYS[MEMORY]))
    return FitError(f"{device} is out of memory at step {step}: {str(error).splitlines()[0]}", fix=ways)
