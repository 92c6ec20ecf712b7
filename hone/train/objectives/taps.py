"""Hidden states, queries, keys and values inside a student and its teacher, for objectives that compare them layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.train.activation_checkpointing import KeepAll
from hone.train.objectives.seen import Heads, Seen

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.config import ModelConfig
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.objectives.base import Objective

torch = lazy("torch")
passes = lazy("hone.train.passes")

_HEADS = "heads"
"""The place in a context's memo of what layers attend with."""


def teacher_layer(layer: int, num_layers: int, teacher_layers: int) -> int:
    """The teacher's layer, from 0, at the depth of a student's: round(l teacher_layers / num_layers) with both counted from 1."""
    return max(1, round((layer + 1) * teacher_layers / num_layers)) - 1


def tap(objective: Objective, model: Decoder, teacher: Decoder | None, context: Context) -> None:
    """Tells the student's pass in `context` which hidden states to store, and which queries, keys and values."""
    pairs = () if teacher is None else objective.pairs(len(model.layers), len(teacher.layers))
    wanted = [*objective.own_taps(len(model.layers)), *(own for own, _ in pairs)]
    context.taps = context.memo["taps"] = dict.fromkeys(wanted) if wanted else None
    if pairs and objective.reads_heads:
        _keep_heads(context)
        context.memo[_HEADS] = dict.fromkeys(own for own, _ in pairs)


def _keep_heads(context: Context) -> None:
    """Makes `context` store what layers attend with, of those layers that its memo names, in their first pass alone.

    It replaces the method of this one context, so that no other pass looks for it.
    """
    attend = context.attend

    def kept(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, **how: Any) -> Tensor:
        wanted = context.memo.get(_HEADS)
        if wanted is not None and wanted.get(layer, q) is None:
            wanted[layer] = Heads(q, *context.keys_and_values(layer, k, v), how.get("window"))
        return attend(layer, q, k, v, **how)

    context.attend = kept  # type: ignore[method-assign]


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
    heads = context.memo.pop(_HEADS, None)
    if teacher is not None and objective.reads_teacher:
        pairs = objective.pairs(len(model.layers), len(teacher.layers)) if own else ()
        with torch.no_grad():
            context.taps = dict.fromkeys(theirs for _, theirs in pairs) if pairs else None
            if heads is not None:
                context.memo[_HEADS] = dict.fromkeys(theirs for _, theirs in pairs)
            if pairs:
                hidden = passes.run_layers(teacher, tokens, context, KeepAll().segments(len(teacher.layers)))
            else:
                hidden = teacher.hidden(tokens, context)
    theirs, context.taps = context.taps, None
    their_heads = context.memo.pop(_HEADS, None)
    loss = objective.total_in(model, x, targets, context, teacher, hidden)
    if not pairs or own is None or theirs is None or teacher is None:
        return loss
    looked_up = objective.reads_embeddings
    mine = _seen(own, heads, model.embed(tokens) if looked_up else None)
    with torch.no_grad():
        wanted = _seen(theirs, their_heads, teacher.embed(tokens) if looked_up else None)
    return loss + objective.tapped([(mine[one], wanted[other]) for one, other in pairs], targets, context)


def _seen(taps: Mapping[int, Any], heads: Mapping[int, Any] | None, embedded: Tensor | None) -> dict[int, Seen]:
    """What was stored of each layer."""
    return {layer: Seen(layer, x, embedded, heads and heads[layer]) for layer, x in taps.items()}


def check_taps(spec: Any, config: ModelConfig, teacher: ModelConfig | None) -> None:
    """Raises SpecError where ranks have not whole sequences and layers to compare, or the models do not fit the objective."""
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
    if spec.objective.reads_heads and spec.compile:
        raise SpecError(
            f"objective {spec.objective.kind} reads queries, keys and values inside layers, which compiled layers do not show",
            fix="set compile: false, or objective: hidden_states",
        )
    for whose, one in (("model", config), ("teacher", teacher)):
        if spec.objective.reads_heads and one.prompt is not None:
            raise SpecError(
                f"objective {spec.objective.kind} compares what tokens see of each other, and those of the {whose} see a soft prompt, too",
                fix="take objective: hidden_states, or an adapter around linears",
            )
    if spec.parallelism.data_parallel.alone and spec.objective.learns_matrices(config, teacher):
        raise SpecError(
            f"objective {spec.objective.kind} learns matrices between unlike widths, whose gradients are summed in every step, and ranks of "
            f"data_parallel {spec.parallelism.data_parallel.kind} take steps of their own",
            fix="set parallelism.data_parallel: ddp, or give models of one width",
        )
    spec.objective.check_models(config, teacher)
