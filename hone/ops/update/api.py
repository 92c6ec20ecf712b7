"""An AdamW step with all that stands around it in one pass over memory, and gradients widened into a float32 tensor.

Legend: N elements of a weight, or of a flat part of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.update import reference
from hone.ops.update.reference import AdamWNumbers


def adamw_step(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamWNumbers,
    *,
    factor: Tensor | None = None,
    rounded: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """One step in place: `weight`, `exp_avg` and `exp_avg_sq` float32 [N] contiguous, `grad` [N] of any float dtype, unchanged.

    The gradient is multiplied by `factor`, a float32 scalar on the device (clipping), before it is used; `rounded` [N], of half
    precision, gets the new weight. Raises SpecError for shapes or dtypes that do not fit.
    """
    tensors = {"weight": weight, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    tensors |= {} if rounded is None else {"rounded": rounded}
    _check(tensors, float32=("weight", "exp_avg", "exp_avg_sq"))
    if factor is not None and (factor.numel() != 1 or factor.dtype != torch.float32):
        raise SpecError(f"factor is {factor.dtype} {tuple(factor.shape)}", fix="give a float32 scalar")
    if backend_of("adamw_step", weight.device, backend, dtype=grad.dtype) == "triton":
        from hone.ops.update.triton_kernels import launch_adamw as step
    else:
        step = reference.adamw_step
    step(weight, grad, exp_avg, exp_avg_sq, numbers, factor, rounded)


def widen(
    into: Tensor, source: Tensor, other: Tensor | None = None, *, add: bool = False, backend: str | None = None
) -> None:
    """Copies `source` of any float dtype into `into`, float32 of the same shape, or adds it there; all are contiguous.

    With `other`, of source's dtype, the sum of both, in float32. Raises SpecError for shapes or dtypes that do not fit.
    """
    tensors = {"into": into, "source": source} | ({} if other is None else {"other": other})
    _check(tensors, float32=("into",))
    if backend_of("widen", into.device, backend, dtype=source.dtype) == "triton":
        from hone.ops.update.triton_kernels import launch_widen

        launch_widen(into, source, other, add)
        return
    into.add_(source) if add else into.copy_(source)
    if other is not None:
        into.add_(other)


def _check(tensors: dict[str, Tensor], float32: tuple[str, ...]) -> None:
    first = next(iter(tensors.values()))
    wrong = [name for name in float32 if tensors[name].dtype != torch.float32]
    same = all(one.shape == first.shape and one.is_contiguous() for one in tensors.values())
    if wrong or not same:
        said = ", ".join(f"{name} {one.dtype} {tuple(one.shape)}" for name, one in tensors.items())
        raise SpecError(
            f"{said} do not fit", fix=f"give contiguous tensors of one shape, {' and '.join(float32)} in float32"
        )
