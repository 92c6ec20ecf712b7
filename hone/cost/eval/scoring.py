"""What scoring a text costs: seconds and memory of one model, or of one and a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hone.base.figure import Estimate
from hone.base.plan import MEMORY
from hone.cost.dims import ModelDims
from hone.cost.memory import score_bytes
from hone.cost.steps import COMPARED, forward_seconds, loss_seconds
from hone.measure.machine import Machine


@dataclass(frozen=True)
class Scoring:
    """`tokens` of `documents`, scored in batches of `batch` tokens by windows of `window` that begin `stride` apart."""

    tokens: int
    documents: int
    batch: int
    window: int
    stride: int
    dtype: str
    weights_bytes: float
    """Of all models."""
    max_rows: int
    """Tokens whose logits exist at once."""
    simulated: bool = False
    """Whether a device is simulated, whose own time nothing estimates."""


def estimate(scoring: Scoring, models: Sequence[ModelDims], machine: Machine) -> dict[str, Estimate]:
    """Time, and the memory that the work adds. `models`: the model, then the reference if there is one."""
    vocab_size, batch = models[0].vocab_size, scoring.batch
    mean_len = max(min(scoring.window, math.ceil(scoring.tokens / scoring.documents)), 1)
    repeated = scoring.window / scoring.stride
    forwards = [forward_seconds(one, machine, tokens=batch, seq_len=mean_len, dtype=scoring.dtype) for one in models]
    softmax_s = (COMPARED if len(models) > 1 else 1) * loss_seconds(machine, batch, vocab_size, train=False)
    value = repeated * scoring.tokens / batch * (sum(forward.value for forward in forwards) + softmax_s)
    each = " + ".join(f"forward [{forward.formula}]" for forward in forwards)
    formula = (
        f"{scoring.tokens * repeated / batch:.1f} batches of {batch} tokens x ({each} + softmax {softmax_s:.3g} s)"
    )
    formula += ", without what the simulation of a device takes" * scoring.simulated
    return {
        "time_s": Estimate(value=value, unit="s", formula=formula, bound=forwards[0].bound or scoring.simulated),
        MEMORY: score_bytes(
            models,
            weights_bytes=scoring.weights_bytes,
            max_tokens=batch,
            max_rows=scoring.max_rows,
            dtype=scoring.dtype,
            device=machine.device,
        ),
    }
