"""Hidden states inside a student and its teacher, for objectives that compare them layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.train.activation_checkpointing import KeepAll

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.objectives.base import Objective

torch = lazy("torch")
passes = lazy("hone.train.passes")


def teacher_layer(layer: int, num_layers: int, teacher_layers: int) -> int:
    """The teacher's layer, from 0, at the depth of a student's: round(l teacher_layers / num_layers) with both counted from 1."""
    return max(1, round((layer + 1) * teacher_layers / num_layers)) - 1


def tap(objective: Objective, model: Decoder, teacher: Decoder | None, context: Context) -> None:
    """Tells the student's pass in `context` which hidden states to store."""
    pairs = () if teacher is None else objective.pairs(len(model.layers), len(teacher.layers))
    wanted = [*objective.own_taps(len(model.layers)), *(own for own, _ in pairs)]
    context.taps = context.memo["taps"] = dict.fromkeys(wanted) if wanted else None


def total(
    objective: Objective,
    model: Decoder,
    teacher: Decoder | None,
    x: Tensor,
    tokens: Tensor,
    targets: Tensor,
    context: Context,
) -> Tensor:
    """The objective summed over the targets [B, S] of a pass whose last hidden states are x; the teacher's pass is made here."""
    hidden, own, pairs = None, context.taps, ()
    if teacher is not None and objective.reads_teacher:
        pairs = objective.pairs(len(model.layers), len(teacher.layers)) if own else ()
        with torch.no_grad():
            context.taps = dict.fromkeys(theirs for _, theirs in pairs) if pairs else None
            if pairs:
                hidden = passes.run_layers(teacher, tokens, context, KeepAll().segments(len(teacher.layers)))
            else:
                hidden = teacher.hidden(tokens, context)
    theirs, context.taps = context.taps, None
    loss = objective.total_in(model, x, targets, context, teacher, hidden)
    if not pairs or own is None or theirs is None:
        return loss
    return loss + objective.tapped([(own[one], theirs[other]) for one, other in pairs], targets)  # type: ignore[misc]


def check_taps(spec: Any, config: ModelConfig, teacher: ModelConfig | None) -> None:
    """Raises SpecError where ranks have not whole sequences and layers to compare, or widths do not fit the objective."""
    if teacher is None:
        return
    pairs = spec.objective.pairs(config.num_layers, teacher.num_layers)
    if not pairs:
        return
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
        if getattr(spec.parallelism, name) > 1:
            raise SpecError(
                f"objective {spec.objective.kind} compares hidden states of whole sequences, layer by layer, of which each rank of "
                f"{name} {getattr(spec.parallelism, name)} has a part",
                fix=f"set parallelism.{name}: 1, or objective: distill",
            )
    spec.objective.check_widths(config.hidden_size, teacher.hidden_size)
