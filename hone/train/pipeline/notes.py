"""What a plan of a training on several ranks says beside its estimates: the share of the peak, and each pipeline rank's part."""

from __future__ import annotations

from typing import Any

from hone.base.figure import human_bytes
from hone.cost.ranks import Transfers
from hone.cost.roofline import speed_of_light
from hone.measure.machine import Machine
from hone.train.work import Work, bytes_by_rank, inside_s, played, step_seconds

DRAWN = 16
"""Most ranks whose schedule is drawn in a terminal."""


def notes(work: Work, machine: Machine) -> tuple[str, ...]:
    """Lines for `Plan.notes`; none for one rank."""
    if machine.num_ranks == 1:
        return ()
    step = step_seconds(work, machine).value
    peak, _, source = speed_of_light(machine, work.dtype)
    flops = 3 * work.model.flops_per_token(work.seq_len) * work.step_tokens
    rate = work.step_tokens * work.filled / step
    found = [
        f"step {step:.3g} s, {rate:,.0f} tokens/s, {rate / machine.num_ranks:,.0f} a rank, "
        f"MFU {flops / step / machine.num_ranks / peak:.1%} of {source}"
    ]
    device, calibration = machine.device, machine.calibration
    times = Transfers(device, calibration.collectives if calibration else (), work.tensor.degree)
    between = work.divided.step_s(work.part, work.dtype, work.gradient_accumulation_steps, device, times)
    inside = inside_s(work, machine)
    if work.pipeline is None:
        found.append(
            f"transfers of a rank: {between:.3g} s of gradients and weights, {inside:.3g} s inside layers ({times.said})"
        )
        return tuple(found)
    passes_of_rank = work.pipeline.table.microbatches / len(work.pipeline.parts)
    found.append(
        f"transfers of a rank: {between:.3g} s of gradients and weights, {inside * passes_of_rank:.3g} s inside layers, "
        f"{work.pipeline.moved_s(machine, work.micro_batch_tokens, work.dtype):.3g} s between stages ({times.said})"
    )
    passes = played(work, work.pipeline, machine)
    found.append(
        f"pipeline {work.pipeline.table.name}: {passes.seconds:.3g} s, bubble {passes.bubble:.1%}; layers divided by "
        + ("their seconds as calibrated" if work.pipeline.timed else "operations")
    )
    found.append(f"{'rank':>4}  {'layers':<14}  {'weights':>9}  {'versions':>8}  {'memory':>9}  waits")
    memories = bytes_by_rank(work, work.pipeline, machine.device)
    for rank, (one, bytes_) in enumerate(zip(work.pipeline.parts, memories, strict=True)):
        held = [work.pipeline.layers[stage] for stage in work.pipeline.table.held(rank)]
        layers = " ".join(f"{part.start}-{part.stop - 1}" for part in held)
        busy = sum(span.end - span.begin for span in passes.spans[rank])
        weights, memory = f"{one.num_params / 1e6:,.1f} M", human_bytes(bytes_.value)
        row = f"{rank:>4}  {layers:<14}  {weights:>9}  {work.pipeline.versions(rank):>8}  {memory:>9}"
        found.append(f"{row}  {1 - busy / passes.seconds:.1%}")
    if len(passes.spans) <= DRAWN and work.pipeline.table.microbatches <= DRAWN:
        from hone.parallel.pipeline.draw import text

        found.append(text(passes))
    return tuple(found)


MOST_DRAWN = 2000
"""Most passes that a training's folder keeps for the report's drawing."""


def drawing(work: Work, machine: Machine) -> dict[str, Any] | None:
    """The schedule of a step in simulated time, as JSON; None without pipeline stages, or of more passes than can be seen."""
    if work.pipeline is None or sum(map(len, work.pipeline.table.ranks)) > MOST_DRAWN:
        return None
    from hone.parallel.pipeline.draw import content

    return content(played(work, work.pipeline, machine), work.pipeline.table.name)
