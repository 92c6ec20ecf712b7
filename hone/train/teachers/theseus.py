"""A teacher whose blocks stand in for the student's, less and less often, so that each learns among blocks that work already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.train.teachers.base import Teacher, Training, Tutor

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig
    from hone.model.decoder import Decoder

torch = lazy("torch")


class Theseus(Teacher):
    """The input 'teacher', and in training steps its layers in place of some of the student's (progressive replacing). Xu et al. 2020, arXiv:2002.02925."""

    paper: ClassVar[str] = "arXiv:2002.02925"
    from_parent: ClassVar[bool] = True
    first: float = Field(
        0.5, ge=0, lt=1, description="Probability of a student's layer in the first step; it rises by equal amounts."
    )
    until: float = Field(
        0.7,
        gt=0,
        le=1,
        description="Share of the steps after which all layers are the student's: the fine-tuning of all of them.",
    )
    seed: int = Field(0, ge=0, description="Seed of the draws; each depends on it, the step and the layer.")

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        assert given is not None, "this objective needs a teacher"
        return Replacing(given, self)

    def own(self, step: int, steps: int, layer: int) -> bool:
        """Whether step `step`, from 0, of `steps` has the student's layer `layer`."""
        rises = step / max(self.until * steps, 1)
        probability = min(1.0, self.first + (1 - self.first) * rises)
        drawn = int(np.random.PCG64([self.seed, step, layer]).random_raw()) / 2.0**64
        return drawn < probability

    def check_models(self, config: ModelConfig, teacher: ModelConfig) -> None:
        """Raises SpecError where the teacher's layers cannot stand in for those of a student of `config`."""
        if config.hidden_size != teacher.hidden_size:
            raise SpecError(
                f"objective.teacher theseus puts layers of width {teacher.hidden_size} among those of width {config.hidden_size}",
                fix="give a student of the teacher's width (init: teacher), or take objective.teacher: fixed",
            )
        if teacher.num_layers % config.num_layers:
            raise SpecError(
                f"objective.teacher theseus: the teacher's {teacher.num_layers} layers are no equal groups for {config.num_layers} of the student",
                fix=f"give a student of a number of layers that divides {teacher.num_layers}",
            )
        if any(layer.feed_forward.kind == "moe" for one in (config, teacher) for layer in one.layers):
            raise SpecError(
                "objective.teacher theseus: experts are balanced by the tokens that come to them, and layers with experts may be replaced",
                fix="take objective.teacher: fixed",
            )
        for name, one in (("student", config), ("teacher", teacher)):
            if any(one.kv_source(layer) is not None for layer in range(one.num_layers)):
                raise SpecError(
                    f"objective.teacher theseus: layers of the {name} read keys of other layers, which may be replaced",
                    fix="take objective.teacher: fixed",
                )


class Replacing(Tutor):
    """Replaces the forward pass of each of the student's layers in steps, by the group of the teacher's layers at its depth."""

    def __init__(self, decoder: Decoder, spec: Theseus) -> None:
        super().__init__(decoder)
        self._spec = spec

    def begin(self, trainer: Training) -> None:
        assert self.decoder is not None
        group = len(self.decoder.layers) // len(trainer.model.layers)
        for index, layer in enumerate(trainer.model.layers):
            others = [self.decoder.layers[at] for at in range(index * group, (index + 1) * group)]
            layer.forward = self._forward(trainer, index, layer, layer.forward, others)

    def _forward(self, trainer: Training, index: int, layer: Any, own: Callable[..., Tensor], others: list[Any]) -> Any:
        def forward(x: Tensor, context: Any) -> Tensor:
            # A pass without gradients is an evaluation, or a peer's look at the student.
            if not torch.is_grad_enabled() or self._spec.own(trainer.done, trainer.steps, index):
                return own(x, context)
            for other in others:
                x = other(x, context)
            # Its weights have a gradient nevertheless, of zero: ranks and the optimizer wait for one.
            return x + sum(one.sum() for one in layer.parameters() if one.requires_grad) * 0

        return forward
