"""Distillation objective: the teacher's whole distribution and the text itself as targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from hone.base.table import Choice, Technique
from hone.train.objectives.base import Objective
from hone.train.objectives.divergences import DIVERGENCES
from hone.train.objectives.divergences.kl import ForwardKL
from hone.train.teachers import TEACHERS
from hone.train.teachers.cached import kept_of
from hone.train.teachers.fixed import Fixed
from hone.train.texts import TEXTS
from hone.train.texts.given import Given

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.objectives.base import Setting
    from hone.train.passes import Preparer
    from hone.train.teachers.base import Tutor


class Distill(Objective):
    """alpha T^2 D(teacher, student) at temperature T + (1 - alpha) cross entropy. Hinton et al. 2015, arXiv:1503.02531."""

    paper: ClassVar[str] = "arXiv:1503.02531"
    alpha: float = Field(
        0.9, ge=0, le=1, description="Weight of the teacher's distribution; that of the text is 1 - alpha."
    )
    temperature: float = Field(
        1.0, gt=0, description="Temperature T of both distributions in D, whose gradient T^2 keeps as large."
    )
    divergence: Annotated[Technique, Choice(DIVERGENCES)] = Field(
        ForwardKL(kind="forward_kl"), description="D, how far the student's distribution is from the teacher's."
    )

    teacher: Annotated[Technique, Choice(TEACHERS)] = Field(
        Fixed(kind="fixed"),
        description="Whose distribution is learned: the input 'teacher' or one made by the training.",
    )
    text: Annotated[Technique, Choice(TEXTS)] = Field(
        Given(kind="data"), description="The tokens on which the two are compared."
    )

    @property
    def from_teacher(self) -> bool:  # type: ignore[override]
        return self.teacher.from_parent

    @property
    def from_cache(self) -> bool:
        return self.teacher.from_cache

    @property
    def reads_teacher(self) -> bool:
        return self.teacher.has_decoder

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        return self.teacher.tutor(model, given)

    def preparer(self, setting: Setting | None) -> Preparer | None:
        return self.text.preparer()  # type: ignore[no-any-return]

    def total_in(
        self,
        model: Decoder,
        x: Tensor,
        targets: Tensor,
        context: Context,
        teacher: Decoder | None,
        teacher_hidden: Tensor | None,
    ) -> Tensor:
        """`total`, or with the log-probabilities that a teacher without a model keeps the same of these."""
        if self.teacher.has_decoder:
            return self.total(model, x, targets, teacher, teacher_hidden)
        from hone.ops.loss.cached import cached_loss

        normed = model.head_input(x).flatten(0, -2)
        return cached_loss(
            normed, model.head_weight, targets.flatten(), kept_of(context, model, normed), alpha=self.alpha,
            divergence=self.divergence.computed(), softcap=model.config.logits_softcap,
        )  # fmt: skip

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
