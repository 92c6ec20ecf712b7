"""Cost of an optimizer's update of the weights: bytes of state and traffic, matmuls, seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hone.base.figure import Estimate
from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.roofline import kernel_rate, matmul_seconds, seconds
from hone.measure.machine import Machine

AROUND_BYTES = 12
"""Bytes moved per weight before the optimizer's step: the gradient is read for the norm, read and written to be scaled."""

WIDEN_BYTES = 12
"""Bytes moved per weight in half precision in addition: its gradient widened to float32, its master weight rounded."""


FUSED_BYTES = 4
"""The same two where the step's own pass over memory scales the gradient: the gradient is read for the norm..."""

FUSED_ROUND_BYTES = 2
"""...and the new weight written in half precision."""


HALF_GRADIENT_BYTES = 2
"""Bytes that each read of a gradient in half precision saves."""

WIDENED_BYTES, ADDED_BYTES = 6, 10
"""Bytes moved per weight to copy such a gradient into a float32 one, and to add it to one."""


MASK_BYTES = 1
"""Bytes of a mask per weight."""

MASK_MOVED_BYTES = 18
"""Bytes per weight and step: its gradient and its master weight read and written, each with the mask."""


@dataclass(frozen=True)
class UpdateCost:
    """An optimizer's update of all weights of one model, in numbers."""

    state_bytes: float
    """Bytes of optimizer state."""
    moved_bytes: float
    """Bytes read and written per step."""
    num_ops: int
    """Operations started per step."""
    work_bytes: float = 0.0
    """Peak temporary bytes beside weights, gradients and state."""
    op_bytes: float | None = None
    """Bytes read by one operation, which decides whether they fit a cache; None: all weights."""
    matmuls: tuple[tuple[int, int, int], ...] = ()
    """Products (rows, columns, inner) of a step..."""
    num_repeats: float = 1.0
    """...and how often each is computed."""
    matmul_dtype: str = "float32"
    fused: bool = False
    """Whether the step's pass over memory also scales gradients and rounds weights."""
    share: float = 1.0
    """The part of the weights that a rank updates."""
    widened: int = 0
    """Passes of a step whose half-precision gradients are added up in float32 ones; 0: the step reads them as they are. Of fused steps."""
    senders: int = 1
    """Ranks whose half-precision gradients of each such pass a rank adds up, for its share of the weights."""
    whole_state_bytes: float = 0.0
    """Of `state_bytes`, what every tensor-parallel rank has whole."""


ADAMW_STATE_BYTES = 8.0
"""Bytes per weight of two moments in float32."""

ADAMW_MOVED_BYTES = 28.0
"""Bytes per weight: it, its gradient and its moments read, all but the gradient written, in one kernel."""

ADAMW_OPS = 40
"""Starts of a fused update: one operation per list of tensors for the norm, the scaling and the step; reading the norm."""


def adamw(dims: ModelDims, *, fused: bool = False) -> UpdateCost:
    """AdamW on all weights; `fused` as on a GPU."""
    numbers = ADAMW_STATE_BYTES * dims.num_params, ADAMW_MOVED_BYTES * dims.num_params
    return UpdateCost(*numbers, ADAMW_OPS, fused=fused)


def layer_matrix_params(dims: ModelDims) -> int:
    """Weights in the layers, all experts counted: nearly all of them in matrices. The rest is embedding and head."""
    return dims.num_params - dims.vocab_size * dims.hidden_size * (1 if dims.tie_embeddings else 2)


def masked(cost: UpdateCost, dims: ModelDims) -> UpdateCost:
    """The update's cost with masks on all of the layers' matrices."""
    inside = layer_matrix_params(dims)
    moved, held = cost.moved_bytes + MASK_MOVED_BYTES * inside, cost.work_bytes + MASK_BYTES * inside
    return replace(cost, moved_bytes=moved, work_bytes=held, num_ops=cost.num_ops + 2 * len(dims.layers))


def update_seconds(cost: UpdateCost, dims: ModelDims, machine: Machine, dtype: str) -> Estimate:
    """Seconds of one update of a rank's share, with weights in `dtype`: the gradient's norm, its scaling, the optimizer's own work."""
    around, half = (FUSED_BYTES, FUSED_ROUND_BYTES) if cost.fused else (AROUND_BYTES, WIDEN_BYTES)
    moved = cost.share * (cost.moved_bytes + dims.num_params * (around + (half if dtype != "float32" else 0)))
    whole = 4 * dims.num_params
    if cost.fused and (rate := kernel_rate(machine, "adamw", dtype, cost.op_bytes or whole)) is not None:
        traffic = _fused(cost, dims, machine, dtype, moved, rate)
    else:
        traffic = seconds(machine, num_bytes=moved, num_ops=cost.num_ops, op_bytes=cost.op_bytes or whole, dtype=dtype)
    value, formula = traffic.value, f"update {traffic.value:.3g} s"
    if cost.matmuls:
        width = 4 if cost.matmul_dtype == "float32" else 2
        products = sum(
            matmul_seconds(machine, (m, n, k), "forward", width * (m * n + m * k + n * k), cost.matmul_dtype)
            for m, n, k in cost.matmuls
        )
        products *= cost.num_repeats * cost.share
        value, formula = value + products, f"{formula} + its matmuls {products:.3g} s"
    return Estimate(value=value, unit="s", formula=formula, bound=traffic.bound)


def _fused(cost: UpdateCost, dims: ModelDims, machine: Machine, dtype: str, moved: float, rate: float) -> Estimate:
    """Seconds of an update in one pass of `moved` bytes, if gradients are float32, and of the sums of its passes' gradients."""
    half, sums = BYTES[dtype] == 2, 0.0
    if half and not cost.widened:
        moved -= cost.share * 2 * HALF_GRADIENT_BYTES * dims.num_params
    elif half:
        size = dims.num_params * (WIDENED_BYTES + ADDED_BYTES * (cost.widened - 1))
        if (
            cost.senders > 1
        ):  # two in one pass, each further one read and added; the sum of a further pass is read twice and written
            one = 2 * WIDENED_BYTES - 4 + ADDED_BYTES * (cost.senders - 2)
            size = cost.share * dims.num_params * (cost.widened * one + 12 * (cost.widened - 1))
        sums = size / (kernel_rate(machine, "widen", dtype, size) or rate)
    started = seconds(machine, num_ops=cost.num_ops, dtype=dtype)
    value = max(moved / rate, started.value) + sums
    formula = f"{moved:.3g} B at {rate / 1e9:,.0f} GB/s, sums of gradients {sums:.3g} s"
    return Estimate(value=value, unit="s", formula=formula, bound=started.bound)
