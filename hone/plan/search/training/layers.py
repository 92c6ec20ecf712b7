"""The inner problem of a training: which layers recompute, exactly as many as each rank's memory asks for, instead of a rule for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hone.cost.activations.segments import Segment, keep_all
from hone.cost.steps import pass_seconds
from hone.plan.search.goal import Goal
from hone.plan.search.ways import Way
from hone.solvers.recomputation import RankLayers, least_recomputation

if TYPE_CHECKING:
    from hone.cost.train.training import Training

RULES = ("every_nth", "full", "none")
"""Rules that the exact choice may replace: they keep a layer's input or all of it, with and without pipeline stages."""

ROOMS = (1.0, 0.97, 0.91, 0.82)
"""Parts of the memory that choices are made for, in turn, until the plan of one needs no more than there is: a schedule holds what no sum says."""


def refined(way: Way, goal: Goal, simulate: Callable[[Way, Goal], Way]) -> Way:
    """`way`, or the same with the layers recomputed that make its step shortest within its memory, if its plan says that it is shorter.

    `simulate` plans a way and raises HoneError where it does not fit. A way that recomputes nothing, or by operation, stays as it is.
    """
    from hone.base.errors import HoneError

    train = way.train
    if train is None or train["recomputation"].partition(" ")[0] not in RULES or train["recomputation"] == "none":
        return way
    work = work_of(way, goal)
    ranks, memory = ranks_of(work, way), way.fleet.memory_bytes
    for part in ROOMS:
        less = (1 - part) * memory
        tight = [one._replace(room=one.room - less) for one in ranks]
        layers = least_recomputation(tight, work.gradient_accumulation_steps)
        if layers is None:
            return way
        asked = replace(way, train={**train, "recomputation": text_of(layers, work.model.num_layers)}, notes=())
        try:
            found = simulate(asked, goal)
        except HoneError:
            continue
        return found if (found.step_s or 0.0) < (way.step_s or 0.0) else way
    return way


def work_of(way: Way, goal: Goal) -> Training:
    """The training of `way` as its stage costs it, every layer kept. The layers of pipeline stages are cut as its plan cuts them."""
    from hone.cost.train.cut import cut
    from hone.feed.epochs import epoch_of
    from hone.plan.search.exact import data_facts
    from hone.plan.search.recipes import recomputation, train_spec
    from hone.train import ACTIVATION_CHECKPOINTINGS
    from hone.train.stage import Train
    from hone.train.to_cost.training import training_of

    assert way.train is not None, "a training has layers"
    fleet, candidate = way.fleet, way.candidate
    stage = Train.read(train_spec(goal, candidate, way.train, ranks=fleet.count))
    data = [data_facts(goal, candidate.dims.vocab_size, way.train["tokens"])]
    given: dict[str, Any] = {} if candidate.shape is not None else {"model": candidate.checkpoint(fleet.served_dtype)}
    divided = stage.parallelism.divided(fleet.machine.num_ranks)
    epoch = epoch_of(data, stage.seq_len)
    config = candidate.checkpoint(fleet.served_dtype).config
    work = training_of(stage, config, data, epoch, given, 1, fleet.machine, divided)
    policy = ACTIVATION_CHECKPOINTINGS.read(recomputation(way.train["recomputation"]))
    work = cut(replace(work, segments=policy.segments(work.model.num_layers)), fleet.machine)
    return replace(work, segments=keep_all(work.model.num_layers))


def ranks_of(work: Training, way: Way) -> list[RankLayers]:
    """What each rank has room for, and what each of its layers takes in bytes kept and in seconds recomputed.

    From the estimates that the plan shows: a layer's bytes are what all layers of its kind take more when they are kept than when they are
    recomputed, divided by their number.
    """
    from hone.cost.train.figures import bytes_by_rank, growth_bytes, play_options

    machine, count, dims = way.fleet.machine, work.model.num_layers, work.model
    pipeline = work.pipeline

    def grown(kept: Sequence[int]) -> list[float]:
        segments = tuple(Segment(layer, layer + 1, layer not in kept) for layer in range(count))
        now = replace(work, segments=segments)
        if pipeline is None:
            return [growth_bytes(now, machine.device).value]
        return [one.value for one in bytes_by_rank(now, pipeline, machine.device)]

    held = [tuple(range(count))]
    if pipeline is not None:
        held = [
            tuple(layer for stage in pipeline.table.held(rank) for layer in pipeline.layers[stage])
            for rank in range(len(pipeline.table.ranks))
        ]
    of_stage = dict.fromkeys(range(count), 0)
    if pipeline is not None:
        of_stage = {layer: stage for stage, layers in enumerate(pipeline.layers) for layer in layers}
    options = work.pass_options(machine.device)
    part = pipeline.dims if pipeline is not None else work.part
    kinds = [(of_stage[layer], dims.layers[layer]) for layer in range(count)]
    again_s = {kind: _again_s(part.layers[kinds.index(kind)], work, machine, options) for kind in dict.fromkeys(kinds)}
    least, found = grown(()), list[RankLayers]()
    for rank, own in enumerate(held):
        # The last layer's backward pass comes first, when what it keeps is in memory in any case.
        last, base = own[-1], grown(own[-1:])[rank]
        kept = {last: max(base - least[rank], 0.0)}
        for kind in dict.fromkeys(kinds[layer] for layer in own):
            same = [layer for layer in own if kinds[layer] == kind and layer != last]
            if same:
                kept |= dict.fromkeys(same, max((grown((*same, last))[rank] - base) / len(same), 0.0))
        busy_s = 0.0
        if pipeline is not None:
            stages = [pipeline.layers[stage] for stage in pipeline.table.held(rank)]
            busy_s = sum(sum(pipeline.passes_s(one, machine, **play_options(work, machine))) for one in stages)
        times, sizes = tuple(again_s[kinds[layer]] for layer in own), tuple(kept[layer] for layer in own)
        found.append(RankLayers(own, busy_s, times, sizes, way.fleet.memory_bytes - least[rank]))
    return found


def _again_s(layer: Any, work: Training, machine: Any, options: dict[str, Any]) -> float:
    """Seconds of a micro-batch that a layer takes more when it runs forward once more."""
    one = replace(work.part, layers=(layer,), vocab_size=0)
    sizes = {"batch_tokens": work.micro_batch_tokens, **options}
    kept, again = (pass_seconds(one, machine, **{**sizes, "recomputed": which}).value for which in ((), (0,)))
    return max(again - kept, 0.0)


def text_of(layers: Sequence[int], count: int) -> str:
    """The name of a choice on the axis of recomputation: 'none', 'full', or 'layers 0-3,7'."""
    if not layers:
        return "none"
    if len(layers) == count:
        return "full"
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers " + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
