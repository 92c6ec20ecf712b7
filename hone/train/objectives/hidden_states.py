"""Distillation of hidden states: the student's layers imitate those of its teacher at the same depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.train.objectives.distill import Distill
from hone.train.objectives.seen import Seen
from hone.train.objectives.taps import teacher_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hone.model.config import ModelConfig
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.teachers.base import Tutor

torch = lazy("torch")
projections = lazy("hone.train.objectives.projections")


class Layers(Distill):
    """Base of the objectives that compare layers beside the distributions."""

    weight: float = Field(
        1.0, gt=0, description="Weight of the comparison of layers, beside that of distributions and text."
    )
    layers: tuple[int, ...] = Field((), description="The student's layers, from 0, that are compared; empty: all.")
    teacher_layers: tuple[int, ...] = Field(
        (), description="The teacher's layer, from 0, beside each of `layers`; empty: those at the same depth."
    )

    def pairs(self, num_layers: int, teacher_layers: int) -> tuple[tuple[int, int], ...]:
        own = self.layers or self.usual_layers(num_layers)
        theirs = self.teacher_layers or tuple(teacher_layer(layer, num_layers, teacher_layers) for layer in own)
        for name, whose, layers, count in (
            ("layers", "student", own, num_layers),
            ("teacher_layers", "teacher", theirs, teacher_layers),
        ):
            if any(not 0 <= layer < count for layer in layers):
                raise SpecError(
                    f"objective.{name} {list(layers)}: the {whose} has layers 0 to {count - 1}",
                    fix=f"name layers that it has, or leave {name} out",
                )
        if len(own) != len(theirs):
            raise SpecError(
                f"objective.teacher_layers has {len(theirs)} layers beside {len(own)} of the student",
                fix="name one for each of layers",
            )
        return tuple(zip(own, theirs, strict=True))

    def usual_layers(self, num_layers: int) -> tuple[int, ...]:
        """The student's layers where none are named."""
        return tuple(range(num_layers))

    def tapped(self, pairs: Sequence[tuple[Seen, Seen]], targets: Tensor, context: Context) -> Tensor:
        valid, total = targets != -100, torch.zeros((), device=targets.device)
        for own, theirs in pairs:
            total = total + (self.compared(own.wide(), theirs.wide(), valid, context) * valid).sum()
        return self.weight * total / len(pairs)

    def compared(self, own: Seen, theirs: Seen, valid: Tensor, context: Context) -> Tensor:
        """The loss [B, S] of a layer beside a teacher's, of the positions that are `valid` [B, S]."""
        raise NotImplementedError

    def learns_matrices(self, config: ModelConfig, teacher: ModelConfig) -> bool:
        """Whether matrices between the two models' widths are trained beside the student."""
        return False

    def check_models(self, config: ModelConfig, teacher: ModelConfig) -> None:
        """Raises SpecError where models of these configs cannot be compared."""


class Projecting(Layers):
    """Base of the objectives that compare hidden states number by number, through a learned matrix where widths differ."""

    def projected_layers(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """The student's layers whose hidden states need a matrix; -1 for the embeddings."""
        return [own for own, _ in pairs]

    def learns_matrices(self, config: ModelConfig, teacher: ModelConfig) -> bool:
        return config.hidden_size != teacher.hidden_size

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        found = super().tutor(model, given)
        if found.decoder is None or not self.learns_matrices(model.config, found.decoder.config):
            return found
        layers = self.projected_layers(self.pairs(len(model.layers), len(found.decoder.layers)))
        widths = model.config.hidden_size, found.decoder.config.hidden_size
        return projections.Projected(found, layers, *widths, model.device)  # type: ignore[no-any-return]


class HiddenStates(Projecting):
    """Half the squared distance, or one less the cosine, of hidden states after layers, added to distill. Romero et al. 2014 (FitNets), arXiv:1412.6550."""

    paper: ClassVar[str] = "arXiv:1412.6550"
    metric: Literal["squared", "cosine"] = Field(
        "squared",
        description="squared: half the mean over the width; cosine: one less the cosine, as DistilBERT (arXiv:1910.01108).",
    )

    def compared(self, own: Seen, theirs: Seen, valid: Tensor, context: Context) -> Tensor:
        mine = projections.projected(context, own.layer, own.hidden)
        if self.metric == "squared":
            return (mine - theirs.hidden).square().mean(-1) / 2
        return 1 - torch.nn.functional.cosine_similarity(mine, theirs.hidden, dim=-1)
