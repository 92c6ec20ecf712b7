"""What a plan of a training on several ranks says beside its estimates: the share of the peak, and each pipeline rank's part."""

from __future__ import annotations

from typing import Any

from hone.base.figure import human_bytes
from hone.cost.memory import BYTES
from hone.cost.roofline import speed_of_light
from hone.cost.train.figures import (
    bytes_by_rank,
    collectives,
    exchange_s,
    growth_bytes,
    inside_s,
    played,
    step_seconds,
)
from hone.cost.train.training import Training
from hone.measure.machine import Machine

DRAWN = 16
"""Most ranks whose schedule is drawn in a terminal."""


def notes(work: Training, machine: Machine) -> tuple[str, ...]:
    """Lines for `Plan.notes`; none for one rank."""
    if machine.num_ranks == 1:
        return ()
    estimated = step_seconds(work, machine)
    step, bound = estimated.value, estimated.bound
    peak, _, source = speed_of_light(machine, work.dtype)
    flops = 3 * work.model.flops_per_token(work.seq_len) * work.step_tokens
    rate = work.step_tokens * work.filled / step
    least, most = ("at least ", "at most ") if bound else ("", "")
    found = [
        *_layout(work, machine.num_ranks),
        f"step {least}{step:.3g} s, {most}{rate:,.0f} tokens/s, {rate / machine.num_ranks:,.0f} a rank, "
        f"MFU {most}{flops / step / machine.num_ranks / peak:.1%} of {source}",
    ]
    device, times = machine.device, collectives(machine, work.tensor.degree)
    times_a_step = work.gradient_accumulation_steps
    between = exchange_s(work, device, times)
    sent = work.updates * work.divided.sent_bytes(work.part, BYTES[work.dtype], times_a_step)
    of_weights = f"{between:.3g} s of gradients and weights ({human_bytes(sent)} sent)"
    inside = inside_s(work, machine, collectives(machine))
    if work.pipeline is None:
        found.append(f"transfers of a rank: {of_weights}, {inside:.3g} s inside layers ({times.said})")
        growth = growth_bytes(work, machine.device)
        found.append(f"memory that the training adds to a rank: {human_bytes(growth.value)} = {growth.formula}")
        return tuple(found)
    passes_of_rank = work.pipeline.table.microbatches / len(work.pipeline.parts)
    found.append(
        f"transfers of a rank: {of_weights}, {inside * passes_of_rank:.3g} s inside layers, "
        f"{work.pipeline.moved_s(machine, work.micro_batch_tokens, work.dtype):.3g} s between stages ({times.said})"
    )
    passes = played(work, work.pipeline, machine)
    found.append(
        f"pipeline {work.pipeline.table.name}: {passes.seconds:.3g} s, bubble {passes.bubble:.1%}; layers divided by "
        + work.pipeline.cut_by
    )
    found.append("of the ranks of each pipeline stage, in order:")
    found.append(f"{'rank':>4}  {'layers':<14}  {'weights':>9}  {'versions':>8}  {'memory':>9}  waits")
    memories = bytes_by_rank(work, work.pipeline, machine.device)
    for rank, (one, bytes_) in enumerate(zip(work.pipeline.parts, memories, strict=True)):
        held = [work.pipeline.layers[stage] for stage in work.pipeline.table.held(rank)]
        layers = " ".join(f"{part.start}-{part.stop - 1}" for part in held)
        busy = sum(span.end - span.begin for span in passes.spans[rank])
        weights, memory = f"{one.num_params / 1e6:,.1f} M", human_bytes(bytes_.value)
        row = f"{rank:>4}  {layers:<14}  {weights:>9}  {work.pipeline.versions(rank):>8}  {memory:>9}"
        found.append(f"{row}  {1 - busy / passes.seconds:.1%}")
    largest = max(memories, key=lambda one: one.value)
    found.append(f"the most memory that the training adds to a rank: {largest.formula}")
    if len(passes.spans) <= DRAWN and work.pipeline.table.microbatches <= DRAWN:
        from hone.parallel.pipeline.draw import legend, text

        found += [text(passes), legend(passes)]
    return tuple(found)


MOST_DRAWN = 2000
"""Most passes that a training's folder keeps for the report's drawing."""


def drawing(work: Training, machine: Machine) -> dict[str, Any] | None:
    """The schedule of a step in simulated time, as JSON; None without pipeline stages, or of more passes than can be seen."""
    if work.pipeline is None or sum(map(len, work.pipeline.table.ranks)) > MOST_DRAWN:
        return None
    from hone.parallel.pipeline.draw import content

    return content(played(work, work.pipeline, machine), work.pipeline.table.name)


def _layout(work: Training, num_ranks: int) -> list[str]:
    """How the ranks are divided, and what of a step's batch one of them has."""
    copies = work.divided.num_ranks // work.context_degree
    pipeline = 1 if work.pipeline is None else len(work.pipeline.parts)
    degrees = {
        "data-parallel": copies,
        "pipeline": pipeline,
        "context-parallel": work.context_degree,
        "tensor-parallel": work.tensor.degree,
    }
    said = " x ".join(f"{degree} {name}" for name, degree in degrees.items() if degree > 1 or name == "data-parallel")
    own, passes = work.batch_size // copies, work.gradient_accumulation_steps
    each = (
        f"{own} of {work.batch_size} sequences in {passes} micro-batch{'es' if passes > 1 else ''} of {own // passes}"
    )
    return [f"{num_ranks} ranks: {said}; a step of each data-parallel rank: {each}"]
