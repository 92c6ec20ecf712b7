"""Distillation objective: the teacher's whole distribution and the text itself as targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from hone.base.table import Choice, Technique
from hone.train.objectives.base import Objective
from hone.train.objectives.divergences import DIVERGENCES
from hone.train.objectives.divergences.kl import ForwardKL

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.decoder import Decoder


class Distill(Objective):
    """alpha T^2 D(teacher, student) at temperature T + (1 - alpha) cross entropy. Hinton et al. 2015, arXiv:1503.02531."""

    paper: ClassVar[str] = "arXiv:1503.02531"
    from_teacher: ClassVar[bool] = True
    alpha: float = Field(
        0.9, ge=0, le=1, description="Weight of the teacher's distribution; that of the text is 1 - alpha."
    )
    temperature: float = Field(
        1.0, gt=0, description="Temperature T of both distributions in D, whose gradient T^2 keeps as large."
    )
    divergence: Annotated[Technique, Choice(DIVERGENCES)] = Field(
        ForwardKL(kind="forward_kl"), description="D, how far the student's distribution is from the teacher's."
    )

    def total(
        self, model: Decoder, x: Tensor, targets: Tensor, teacher: Decoder | None, teacher_hidden: Tensor | None
    ) -> Tensor:
        """The loss in nats summed over the valid targets. T^2 keeps the gradient's size when T changes."""
        from hone.train.objectives.distill_loss import distill_loss

        assert teacher is not None and teacher_hidden is not None, "distill without a teacher"
        return distill_loss(
            model.head_input(x).flatten(0, -2),
            model.head_weight,
            teacher.head_input(teacher_hidden).flatten(0, -2),
            teacher.head_weight,
            targets.flatten(),
            alpha=self.alpha,
            temperature=self.temperature,
            divergence=self.divergence.computed(),
            softcaps=(model.config.logits_softcap, teacher.config.logits_softcap),
            divided=getattr(model, "vocabulary", None),
        )
