"""Integers whose steps are learned with the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.train.quantization_aware.base import FakeQuantizer

if TYPE_CHECKING:
    from torch import Tensor


class LearnedSteps(FakeQuantizer):
    """Weights on symmetric integer grids whose steps are trained too (LSQ). Esser et al. 2019, arXiv:1902.08153."""

    paper: ClassVar[str] = "arXiv:1902.08153"
    learns_steps: ClassVar[bool] = True
    bits: int = Field(4, ge=2, le=8, description="Bits per weight.")
    group_size: int = Field(128, ge=0, description="Columns that share a step; 0 for one step per row.")

    @property
    def exported(self) -> dict[str, Any]:
        options = {"bits": self.bits, "group_size": self.group_size, "symmetric": True, "scale": "found"}
        return {**super().exported, "kind": "rtn", **options}

    def problem(self, columns: int, modules: Sequence[int]) -> str | None:
        if self.group_size and columns % self.group_size:
            return f"group_size {self.group_size} does not divide its {columns} input features"
        return None

    def first_steps(self, weight: Tensor) -> Tensor:
        """The steps [N, G] with which a training of weights [N, K] begins: of weights that lie on a grid its own, else
        2 mean |w| / sqrt(2^(bits - 1) - 1), as in the paper; float16 numbers, in float32."""
        import torch

        from hone.ops.rounding.found_grid import grid_of
        from hone.ops.rounding.integer_grid import stored

        found = grid_of(weight.detach(), self.bits, self.group_size, torch.float16)
        if found is not None:
            return found.scales.float()
        groups = weight.detach().float().reshape(len(weight), -1, self.group_size or weight.shape[1])
        return stored(2 * groups.abs().mean(-1) / self._most**0.5, torch.float16).float()

    def rounded(self, weight: Tensor, modules: Sequence[int]) -> Tensor:
        return self.with_steps(weight, self.first_steps(weight))

    def with_steps(self, weight: Tensor, steps: Tensor) -> Tensor:
        """Weights [N, K] rounded with `steps` [N, G], of which the nearest float16 numbers are taken; differentiable in both.

        The gradient of a step is divided by the square root of its group's size times the largest code, as in the paper.
        """
        import torch

        from hone.ops.rounding.integer_grid import Grid, stored
        from hone.ops.rounding.straight_through import fake_quantize, straight_through

        share = 1 / (weight.shape[1] / steps.shape[1] * self._most) ** 0.5
        damped = steps.detach() + share * (steps - steps.detach())
        held = straight_through(damped, stored(steps.detach(), torch.float16).float())
        return fake_quantize(weight.float(), Grid(held), self.bits).to(weight.dtype)

    @property
    def _most(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1
