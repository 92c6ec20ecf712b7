"""Distillation of hidden states: the student's layers imitate those of its teacher at the same depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.train.objectives.distill import Distill
from hone.train.objectives.taps import teacher_layer

if TYPE_CHECKING:
    from torch import Tensor


class Layers(Distill):
    """Base of the objectives that compare layers beside the distributions."""

    weight: float = Field(
        1.0, gt=0, description="Weight of the comparison of layers, beside that of distributions and text."
    )
    layers: tuple[int, ...] = Field(
        (), description="The student's layers, from 0, each compared with the teacher's at the same depth; empty: all."
    )

    def pairs(self, num_layers: int, teacher_layers: int) -> tuple[tuple[int, int], ...]:
        own = self.layers or range(num_layers)
        if any(not 0 <= layer < num_layers for layer in own):
            raise SpecError(
                f"objective.layers {list(self.layers)}: the student has layers 0 to {num_layers - 1}",
                fix="name layers that it has, or leave layers out",
            )
        return tuple((layer, teacher_layer(layer, num_layers, teacher_layers)) for layer in own)

    def tapped(self, pairs: Sequence[tuple[Tensor, Tensor]], targets: Tensor) -> Tensor:
        import torch

        valid, total = targets != -100, torch.zeros((), device=targets.device)
        for own, theirs in pairs:
            wide = torch.promote_types(own.dtype, torch.float32)
            total = total + (self.compared(own.to(wide), theirs.to(wide), valid) * valid).sum()
        return self.weight * total / len(pairs)

    def compared(self, own: Tensor, theirs: Tensor, valid: Tensor) -> Tensor:
        """The loss [B, S] of hidden states [B, S, D] beside a teacher's [B, S, D'], of the positions that are `valid` [B, S]."""
        raise NotImplementedError

    def check_widths(self, width: int, teacher_width: int) -> None:
        """Raises SpecError where hidden states of these widths cannot be compared."""


class HiddenStates(Layers):
    """Half the squared distance, or one less the cosine, of hidden states after layers, added to distill. Romero et al. 2014, arXiv:1412.6550."""

    paper: ClassVar[str] = "arXiv:1412.6550"
    metric: Literal["squared", "cosine"] = Field(
        "squared",
        description="squared: half the mean over the width; cosine: one less the cosine, as DistilBERT (arXiv:1910.01108).",
    )

    def compared(self, own: Tensor, theirs: Tensor, valid: Tensor) -> Tensor:
        if self.metric == "squared":
            return (own - theirs).square().mean(-1) / 2
        import torch

        return 1 - torch.nn.functional.cosine_similarity(own, theirs, dim=-1)

    def check_widths(self, width: int, teacher_width: int) -> None:
        if width != teacher_width:
            raise SpecError(
                f"objective hidden_states compares hidden states of one width, and the student has {width}, the teacher {teacher_width}",
                fix="take objective: relations, which compares widths that differ",
            )
