"""Muon: the step of a matrix is its orthogonalised momentum, so that all singular directions have the same size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.lazy import lazy
from hone.cost.dims import ModelDims
from hone.cost.train.update import ADAMW_MOVED_BYTES, ADAMW_OPS, ADAMW_STATE_BYTES, UpdateCost, layer_matrix_params
from hone.train.optimizers.adamw import AdamWRule
from hone.train.optimizers.base import Entry, Group, Optimizer, Parameter, Rule, by_decay

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic: steep at zero, so that five iterations map singular values from 0.005 on to between 0.7 and 1.2."""

STATE_BYTES = 4
MOVED_BYTES = 52
"""Bytes per weight: momentum 12; Nesterov 12; the direction rounded, scaled and read back 16; decay and step 12."""


class Muon(Optimizer):
    """Orthogonalises the momentum of the layers' matrices by Newton-Schulz; AdamW for other weights. Jordan et al. 2024; Liu et al. 2025 (Moonlight), arXiv:2502.16982."""

    paper: ClassVar[str] = "arXiv:2502.16982"
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of gradients.")
    nesterov: bool = Field(
        True, description="Nesterov momentum: orthogonalise the mean after adding the gradient once more."
    )
    ns_steps: int = Field(5, ge=1, description="Newton-Schulz iterations.")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="Scale of a matrix's step: original, sqrt(max(1, rows / columns)); match_rms_adamw, 0.2 sqrt(max(rows, "
        "columns)), which makes it as large as AdamW's (Moonlight), so that both use one learning rate.",
    )
    adamw_lr: float | None = Field(None, gt=0, description="Peak learning rate of AdamW's weights; empty: lr.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the running mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the running mean of squared gradients.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of AdamW's second moment.")

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """The layers' matrices, then the rest in AdamW's groups."""
        matrices = tuple(name for name, one in parameters.items() if one.kind == "matrix")
        rest = [name for name in parameters if name not in set(matrices)]
        muon = MuonRule(self.momentum, self.nesterov, self.ns_steps, self.adjust_lr_fn)
        groups = [Group(matrices, muon, self.weight_decay)] if matrices else []
        rule = AdamWRule(self.beta1, self.beta2, self.eps)
        return groups + by_decay(parameters, rest, rule, self.weight_decay, (self.adamw_lr or self.lr) / self.lr)

    def cost(self, dims: ModelDims, dtype: str, device: str) -> UpdateCost:
        """Cost of one momentum per matrix weight; each iteration has three matrix products."""
        inside = layer_matrix_params(dims)
        rest = dims.num_params - inside
        matmuls, largest, count = [], 0, 0
        for layer in dims.layers:
            for out_features, in_features in layer.matmuls:
                short, long = sorted((out_features, in_features))
                matmuls += [(short, short, long), (short, short, short), (short, long, short)] * self.ns_steps
                largest, count = max(largest, short * long), count + 1
        on_gpu = device.startswith("cuda")
        return UpdateCost(
            state_bytes=STATE_BYTES * inside + ADAMW_STATE_BYTES * rest,
            moved_bytes=(MOVED_BYTES + 5 * 4 * self.ns_steps) * inside + ADAMW_MOVED_BYTES * rest,
            num_ops=ADAMW_OPS + (10 + 5 * self.ns_steps) * count,
            work_bytes=(4 + 3 * (2 if on_gpu else 4)) * largest,
            matmuls=tuple(matmuls),
            num_repeats=inside / max(sum(layer.matmul_params for layer in dims.layers), 1),
            matmul_dtype="bfloat16" if on_gpu else "float32",
        )


@dataclass(frozen=True)
class MuonRule(Rule):
    """Muon on matrices; the matrices of a fused one (queries, keys and values) and of a stack of experts [E, N, K] are separate."""

    momentum: float
    nesterov: bool
    ns_steps: int
    adjust_lr_fn: Literal["original", "match_rms_adamw"]
    reads_whole: ClassVar[bool] = True

    def start(self, weight: Tensor, parameter: Parameter) -> dict[str, Tensor]:
        """The momentum, as zeros."""
        return {"momentum": torch.zeros_like(weight)}

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """M is the running mean of G; W (1 - lr decay) - lr scale O(M), where O is `orthogonalize`."""
        for entry in entries:
            average = entry.state["momentum"].lerp_(entry.grad, 1 - self.momentum)
            direction = entry.grad.lerp(average, self.momentum) if self.nesterov else average
            entry.weight.mul_(1 - lr * weight_decay)
            direction = direction if entry.part is None else entry.part.join(direction)
            rows = list(entry.parameter.pieces) or [direction.shape[-2]]
            if entry.part is None:
                for weight, part in zip(entry.weight.split(rows, -2), direction.split(rows, -2), strict=True):
                    weight.sub_(orthogonalize(part, self.ns_steps).to(weight.dtype), alpha=lr * self.scale(part.shape))
                continue
            step = [orthogonalize(part, self.ns_steps) * self.scale(part.shape) for part in direction.split(rows, -2)]
            entry.weight.sub_(entry.part.take(torch.cat(step, -2)).to(entry.weight.dtype), alpha=lr)

    def scale(self, shape: Sequence[int]) -> float:
        """The factor of an orthogonal step of this shape [..., rows, columns]."""
        rows, columns = shape[-2:]
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of `matrix` [..., rows, columns], by Newton-Schulz.

    Its singular values are about 0.7 to 1.2, not 1: five iterations of a quintic. In bfloat16 on a GPU, like Jordan's; in
    the matrix's own dtype on a CPU. A zero matrix stays zero.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.float().norm(dim=(-2, -1), keepdim=True).clamp_min(1e-20).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
