"""Ways out of a training's want of memory: what a plan proposes, and what the error of one that has begun says."""

from __future__ import annotations

from typing import Any

from hone.base.errors import FitError
from hone.base.plan import MEMORY

WAYS = {
    MEMORY: ("use a smaller model", "shorten seq_len", "train where more memory is free, or on more ranks"),
}
"""Ways out when memory is too small, besides `remedies`."""


def remedies(spec: Any) -> list[list[tuple[str, str]]]:
    """Changes of the training `spec` that may need less memory; see `Stage.remedies`."""
    batch, now = spec.batch_size, spec.gradient_accumulation_steps
    return [
        [("gradient_accumulation_steps", str(count)) for count in range(now + 1, batch + 1) if batch % count == 0],
        [("activation_checkpointing", kind) for kind in ("memory_budget", "full")],
        [("optimizer", "adamw_8bit")],
        [("seq_len", str(spec.seq_len // part)) for part in (2, 4, 8) if spec.seq_len // part >= SHORTEST],
    ]


SHORTEST = 64
"""Tokens of the shortest sequences that are proposed."""


def out_of_memory(error: BaseException, device: str, step: int) -> FitError | None:
    """The error for the user when `error` of step `step` is one of torch's several out-of-memory errors; else None."""
    if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
        return None
    return FitError(
        f"{device} is out of memory at step {step}: {str(error).splitlines()[0]}", fix="; or ".join(WAYS[MEMORY])
    )
