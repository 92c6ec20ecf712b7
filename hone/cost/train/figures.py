"""What a training costs: seconds of a step, bytes of memory and disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hone.base.figure import Estimate, human_bytes
from hone.base.plan import DISK, MEMORY
from hone.cost.activations.segments import copied_bytes, layer_bytes, live_layers, replayed_layers
from hone.cost.dims import ModelDims
from hone.cost.files import beside_bytes, commit_seconds
from hone.cost.memory import BYTES, train_bytes
from hone.cost.pipeline.simulate import Played
from hone.cost.ranks import Transfers, beside_seconds
from hone.cost.roofline import seconds, waits_s
from hone.cost.serve.offload import link_rate
from hone.cost.steps import coded_params, forward_seconds, held_cast_seconds, product_seconds, train_step_seconds
from hone.cost.train.offload import places, stepped
from hone.cost.train.pipeline import Pipelined
from hone.cost.train.rates import HOST_BYTES_PER_S, MOST_BYTES_PER_S
from hone.cost.train.tensor import Messages
from hone.cost.train.training import CHECKPOINTS, STATE_BYTES, Training
from hone.cost.train.update import UpdateCost, update_seconds
from hone.measure.machine import Machine

DRAW_S = 12e-9
"""Seconds of one thread to draw a normal number and scale it (two-core AMD EPYC); up to eight threads draw."""


def estimate(work: Training, machine: Machine) -> dict[str, Estimate]:
    """Estimates of the training's figures."""
    step = step_seconds(work, machine)
    evaluation, around = _evaluation_s(work, machine), _around_s(work, machine)
    num_params, width = work.model.num_params, work.saved_width
    beside = beside_bytes(work.model.vocab_size)
    saved, written = work.saved_params, work.written_params
    weights = f"{written:,} parameters x {width} bytes"
    found = {
        "time_s": Estimate(
            value=work.steps * step.value + evaluation + around,
            unit="s",
            formula=f"{work.steps} steps x {step.value:.3g} s + evaluation {evaluation:.3g} s + first weights and files "
            f"{around:.3g} s; step: {step.formula}",
            bound=step.bound,
        ),
        "tokens_per_s": Estimate(
            value=work.step_tokens * work.filled / step.value,
            unit="tokens/s",
            formula=f"{work.step_tokens * work.filled:.6g} tokens / {step.value:.3g} s a step",
            bound=step.bound,
        ),
        MEMORY: growth_bytes(work, machine.device),
        "num_params": Estimate(value=float(num_params), unit="parameters", formula="config", tolerance=0.0),
        **trained(work),
        **counts(work),
        "model_bytes": Estimate(value=float(width * written), unit="B", formula=weights, tolerance=0.02),
        DISK: Estimate(
            value=float(work.num_models * (width * written + beside) + work.log_bytes),
            unit="B",
            formula=(f"{work.num_models} models x ({weights}" if work.num_models > 1 else weights)
            + f" + tokenizer and manifest {human_bytes(beside)}{')' * (work.num_models > 1)} + logs "
            + human_bytes(work.log_bytes),
        ),
    }
    state = state_bytes(work)
    one = checkpoint_bytes(work)
    told = f"float32 weights {human_bytes(4 * saved)} + optimizer {human_bytes(state)}"
    told += f" + predictions {human_bytes(work.remembered)}" if work.remembered else ""
    if work.num_checkpoints:
        formula = f"{work.num_checkpoints} x ({told})"
        found[CHECKPOINTS] = Estimate(value=work.num_checkpoints * one, unit="B", formula=formula, tolerance=0.05)
    if work.keeps_state:
        folder = found[DISK]
        larger = {"value": folder.value + one, "formula": f"{folder.formula} + training state {human_bytes(one)}"}
        found[STATE_BYTES] = Estimate(value=one, unit="B", formula=told, tolerance=0.05)
        found[DISK] = folder.model_copy(update=larger)
    return found


def checkpoint_bytes(work: Training) -> float:
    """Bytes of one checkpoint: float32 weights, the optimizer's state of all ranks, and the velocity of an outer step."""
    divided = work.divided
    # Ranks that combine weights every so many steps keep an optimizer's state each; of `kept_bytes` local_sgd's 4 are the weights.
    velocity = divided.kept_bytes - 4 if divided.every and not divided.peers else 0.0
    delayed = BYTES[work.dtype] if not work.offload.exact else 0  # the next step's weights
    return (4 + velocity + delayed) * work.saved_params + state_bytes(work) + work.remembered


def state_bytes(work: Training) -> float:
    """Bytes of the optimizer's state of all ranks, without copies."""
    every, here = work.trained or work.model, work.trained_here or work.part
    parts, whole = every.num_params / here.num_params, work.update.whole_state_bytes
    each = (work.update.state_bytes - whole) * parts + whole * max(parts / work.tensor.degree, 1.0)
    return each * (work.divided.num_ranks if work.divided.every else 1)


def trained(work: Training) -> dict[str, Estimate]:
    """The parameters that are trained, where some are frozen."""
    if work.trained is None:
        return {}
    count, whole = work.trained.num_params, work.model.num_params
    formula = f"{count / whole:.3%} of {whole:,}; the others are frozen"
    return {"trained_params": Estimate(value=float(count), unit="parameters", formula=formula, tolerance=0.0)}


def counts(work: Training) -> dict[str, Estimate]:
    """The tokens that the steps read, the share of positions that are padding, and epochs."""
    positions, epoch = work.steps * work.step_tokens, work.epoch
    said = f"{work.steps} steps x {work.step_tokens}"
    if epoch is None or not epoch.num_sequences:
        return {"train_tokens": Estimate(value=float(positions), unit="tokens", formula=said, tolerance=0.0)}
    sequences = work.steps * work.batch_size
    padded = f"{epoch.padding} of {epoch.positions} positions of an epoch"
    return {
        "train_tokens": Estimate(
            value=float(round(positions * work.filled)),
            unit="tokens",
            formula=f"{said} positions" + (f", without padding ({padded})" if epoch.padding else ""),
            tolerance=None if epoch.padding else 0.0,  # which sequences a part of an epoch has depends on the seed
        ),
        "padding": Estimate(value=1 - work.filled, unit="fraction", formula=padded),
        "epochs": Estimate(
            value=sequences / epoch.num_sequences,
            unit="epochs",
            formula=f"{sequences} sequences read / {epoch.num_sequences} in the data",
        ),
    }


def step_seconds(work: Training, machine: Machine) -> Estimate:
    """Seconds of one optimizer step, including the teacher's forward pass."""
    if work.pipeline is not None:
        pipeline = replace(work.pipeline, updates=tuple(updated(work, one) for one in work.pipeline.updates))
        step = pipeline.step(played(work, pipeline, machine), machine, work.dtype)
    else:
        step = train_step_seconds(
            work.part,
            machine,
            batch_tokens=work.micro_batch_tokens,
            micro_batches=work.gradient_accumulation_steps,
            recomputed=work.recomputed,
            replayed=replayed_layers(work.segments),
            update=updated(work, work.update),
            **work.pass_options(machine.device),
        )
    return with_more(step, work, machine)


def updated(work: Training, update: UpdateCost) -> UpdateCost:
    """`update` as a rank makes it: of its share, with gradients as they come."""
    share = 1 / work.divided.of("optimizer")
    return replace(update, share=share, widened=work.passes_widened, senders=work.senders)


def with_more(step: Estimate, work: Training, machine: Machine) -> Estimate:
    """`step`, passes and update, with all else that a step takes: codes, copies, transfers, a teacher."""
    times, inside = collectives(machine), 0.0
    if work.pipeline is None:
        inside = inside_s(work, machine, times)
    elif work.holds_codes:
        cast = max(held_cast_seconds(one, machine, work.dtype, work.fp8_recipe) for one in work.pipeline.parts)
        formula = f"{step.formula} + codes of weights {cast:.3g} s"
        step = step.model_copy(update={"value": step.value + cast, "formula": formula})
    copied = _copies_s(work, step.value, machine)
    if copied:
        formula = f"{step.formula} + waits for copies of activations {copied:.3g} s (link rates may be assumed)"
        step = step.model_copy(update={"value": step.value + copied, "formula": formula})
    here = update_seconds(updated(work, work.update), work.trained_here or work.part, machine, work.dtype).value
    step = stepped(step, here, work.offload, work.load, machine)
    if inside:
        inside = waits_s(machine, work.dtype, step.value, inside)
        said = f", {hidden_s(work, machine, times):.3g} s more beside products" if work.tensor.overlap else ""
        said = f"transfers inside layers {inside:.3g} s{said} ({times.said})"
        step = step.model_copy(update={"value": step.value + inside, "formula": f"({step.formula}) + {said}"})
    if work.divided.num_ranks > 1:
        step = with_transfers(step, work, machine)
    if work.teacher is None:
        return step
    extra = _forward_s(work.teacher, work, machine)
    passes, hidden = work.gradient_accumulation_steps, work.teacher.hidden_size
    sent = Messages(hidden, work.micro_batch_tokens, work.dtype, machine.device, passes, processor=machine.processor)
    extra += work.tensor.forward_s(work.teacher.num_layers, sent)
    return step.model_copy(
        update={"value": step.value + extra, "formula": f"{step.formula} + teacher's forward {extra:.3g} s"}
    )


def _copies_s(work: Training, step_s: float, machine: Machine) -> float:
    """Seconds that a step waits for activations on their way to the host and back.

    On a GPU copies run beside the forward pass, a third of the step, and back beside the backward pass. On a CPU nothing
    runs beside them, and each reads and writes.
    """
    width, hidden, tokens = BYTES[work.dtype], work.part.hidden_size, work.micro_batch_tokens
    layers = [layer_bytes(one, hidden, tokens, width, 0, fp8=work.keeps_codes) for one in work.part.layers]
    moved = work.gradient_accumulation_steps * copied_bytes(work.segments, layers)
    if machine.device.startswith("cuda"):
        each = moved / link_rate(machine)[0]
        return max(each - step_s / 3, 0.0) + max(each - 2 * step_s / 3, 0.0)
    return 4 * moved / min(HOST_BYTES_PER_S * machine.num_threads, MOST_BYTES_PER_S)


def collectives(machine: Machine, stride: int = 1) -> Transfers:
    """The collectives between ranks that are `stride` apart, as calibrated."""
    table = machine.calibration.collectives if machine.calibration else ()
    return Transfers(machine.device, table, stride, machine.processor)


def inside_s(work: Training, machine: Machine, times: Transfers) -> float:
    """Seconds of the transfers inside the layers of a step that it waits for, of a pipeline's those of one micro-batch through all stages."""
    sent = _messages(work, machine)
    added = seconds(machine, num_bytes=work.tensor.added_bytes(sent), dtype=work.dtype).value
    told = {"micro_batches": sent.micro_batches, "recomputed": work.recomputed}
    rows = work.experts.step_s(work.model, sent.tokens, work.dtype, times, **told)
    return work.tensor.step_s(sent, times) - hidden_s(work, machine, times) + added + rows


def hidden_s(work: Training, machine: Machine, times: Transfers) -> float:
    """Seconds of such transfers that pass beside products, which they do not slow: copy engines make them."""
    if not work.tensor.overlap or work.tensor.dims is None:
        return 0.0
    products = [
        ((work.micro_batch_tokens, *shape), "forward") for one in work.tensor.dims.layers for shape in one.matmuls
    ]
    return work.tensor.hidden_s(_messages(work, machine), product_seconds(machine, products, work.dtype), times)


def _messages(work: Training, machine: Machine) -> Messages:
    """What the ranks of one layer send each other in a step, of a pipeline in one micro-batch through all stages."""
    passes = work.gradient_accumulation_steps if work.pipeline is None else 1
    sizes = work.model.hidden_size, work.micro_batch_tokens, work.dtype, machine.device
    more = {"recomputed": len(work.recomputed), "processor": machine.processor}
    return Messages(*sizes, micro_batches=passes, **more)


def played(work: Training, pipeline: Pipelined, machine: Machine) -> Played:
    """The passes of a step's micro-batches in simulated time."""
    return pipeline.played(machine, **play_options(work, machine))


def play_options(work: Training, machine: Machine) -> dict[str, Any]:
    """What passes of stages take their seconds from, as `Pipelined.played` takes it."""
    return {
        "tokens": work.micro_batch_tokens,
        "recomputed": work.recomputed,
        "options": work.pass_options(machine.device),
        "inside": inside_s(work, machine, collectives(machine)),
    }


def exchange_s(work: Training, device: str, times: Transfers) -> float:
    """Seconds in which gradients and weights travel in a step."""
    each = work.divided.step_s(
        work.trained_here or work.part, work.dtype, work.gradient_accumulation_steps, device, times
    )
    frozen = sum(one.times * times.seconds(one.op, one.ranks, one.num_bytes) for one in work.frozen_gathers)
    return work.updates * each + frozen


def with_transfers(step: Estimate, work: Training, machine: Machine) -> Estimate:
    """`step` with the transfers between ranks: on a GPU beside the work, which they slow, except for what they take longer, for
    those that nothing is left to pass beside, and for those of context parallelism that a layer waits for."""
    device = machine.device
    times = collectives(machine, work.tensor.degree)
    moved = exchange_s(work, device, times)
    # A pipeline's sums begin when its passes have ended, those of an asynchronous one when an update is due.
    waits = (
        moved
        if work.pipeline is not None
        else work.divided.exposed_s(work.trained_here or work.part, work.dtype, device, times)
    )
    for first in work.frozen_gathers[:1]:  # a step's first layer waits for its own
        waits += times.seconds(first.op, first.ranks, first.num_bytes)
    told = ""
    if work.context_degree > 1 and work.context is not None:
        passes, repeated = work.gradient_accumulation_steps, len(work.recomputed)
        shared = work.context.step_s(work.context_sizes, passes, repeated, device, machine.processor)
        times.assumed.add(work.context.kind)
        told = f", of which {work.context.kind} {shared:.3g} s"
        moved, waits = moved + shared, waits + (0.0 if work.context.overlaps else shared)
    value, how = step.value + moved, "+"
    if device.startswith("cuda"):
        value, said = beside_seconds(machine, step.value, moved, waits)
        how, told = "beside", told + said
    formula = f"({step.formula}) {how} transfers {moved:.3g} s{told} ({times.said})"
    return step.model_copy(update={"value": value, "formula": formula})


def growth_bytes(work: Training, device: str, *, passes: int | None = None) -> Estimate:
    """Bytes that the training adds at its peak to the memory in use before, on the pipeline rank that needs most.

    `passes` whose gradients are summed; None: those of a step.
    """
    if work.pipeline is not None:
        return max(bytes_by_rank(work, work.pipeline, device), key=lambda found: found.value)
    tokens, on_gpu = work.micro_batch_tokens, device.startswith("cuda")
    attends_in_parts = work.context is not None and work.context.zigzag  # and stores no mask
    growth = train_bytes(
        work.part,
        batch_tokens=tokens,
        seq_len=work.seq_len,
        dtype=work.dtype,
        update=work.update,
        passes=work.gradient_accumulation_steps if passes is None else passes,
        wide=work.tensor.degree > 1,
        packed=work.packed and (work.context_degree == 1 or not attends_in_parts),
        segments=work.segments,
        loss_chunk=work.loss_chunk(device),
        kernels=on_gpu,
        device=device,
        divided=work.divided,
        fp8=work.keeps_codes,
        trained=work.trained_here,
        lean=work.lean,
        frozen_bytes=work.frozen_bytes,
    )
    if work.holds_codes:
        held = 2 * coded_params(work.part, work.fp8_recipe)
        said = f"{growth.formula} + fp8 codes of the layers' weights {human_bytes(held)}"
        growth = growth.model_copy(update={"value": growth.value + held, "formula": said})
    if work.context_degree > 1 and work.context is not None:
        kept = work.context.kept_bytes(work.context_sizes, device)
        said = f"{growth.formula} + {work.context.kind} {human_bytes(kept)}"
        growth = growth.model_copy(update={"value": growth.value + kept, "formula": said})
    moved = places(work.offload, work.load, device).device
    if moved:
        formula = f"{growth.formula} - moved to the host {human_bytes(moved)}"
        growth = growth.model_copy(update={"value": growth.value - moved, "formula": formula})
    less = work.tensor.saved_bytes(work.model.hidden_size, tokens, live_layers(work.segments), work.dtype)
    if less:
        formula = f"{growth.formula} - tokens of other tensor-parallel ranks {human_bytes(less)}"
        growth = growth.model_copy(update={"value": growth.value - less, "formula": formula})
    room = work.tensor.room_bytes(work.model.hidden_size, tokens, work.dtype, device)
    if room:
        formula = f"{growth.formula} + room for their copies {human_bytes(room)}"
        growth = growth.model_copy(update={"value": growth.value + room, "formula": formula})
    rows = work.experts.room_bytes(work.part, tokens, work.dtype)
    if rows:
        formula = f"{growth.formula} + rows of experts on their way {human_bytes(rows)}"
        growth = growth.model_copy(update={"value": growth.value + rows, "formula": formula})
    if work.snapshot and work.num_checkpoints and not on_gpu:
        copied = (4 * (work.trained_here or work.part).num_params + work.update.state_bytes) / work.divided.of(
            "optimizer"
        )
        formula = f"{growth.formula} + copy for checkpoints {human_bytes(copied)}"
        growth = growth.model_copy(update={"value": growth.value + copied, "formula": formula})
    if work.remembered and not on_gpu:
        kept = work.remembered * (1 + bool(work.num_checkpoints))  # a checkpoint is written from a copy
        formula = f"{growth.formula} + predictions {human_bytes(kept)}"
        growth = growth.model_copy(update={"value": growth.value + kept, "formula": formula})
    if work.teacher is None:
        return growth
    weights = 0 if work.teaches_itself else work.teacher.num_params
    extra = BYTES[work.dtype] * (weights + tokens * work.teacher.hidden_size)
    return growth.model_copy(
        update={"value": growth.value + extra, "formula": f"{growth.formula} + teacher {human_bytes(extra)}"}
    )


def by_rank(work: Training, pipeline: Pipelined, *, first: bool = False) -> list[Training]:
    """The work of each pipeline rank, as that of a model of its layers with all that it holds at once; `first` as `Pipelined.live`."""
    found = []
    for rank, (part, update) in enumerate(zip(pipeline.parts, pipeline.updates, strict=True)):
        tensor = replace(work.tensor, dims=part if work.tensor.degree > 1 else None)
        segments = pipeline.live(rank, work.segments, first=first)
        found.append(replace(work, model=part, update=update, tensor=tensor, segments=segments, pipeline=None))
    return found


def bytes_by_rank(work: Training, pipeline: Pipelined, device: str) -> list[Estimate]:
    """As `growth_bytes`, of each pipeline rank: the larger of before it has gradients of weights, and with them."""
    about = work.dtype, work.divided.of("optimizer")
    before = [growth_bytes(one, device, passes=1) for one in by_rank(work, pipeline, first=True)]
    after = [growth_bytes(one, device) for one in by_rank(work, pipeline)]
    most = [max(pair, key=lambda one: one.value) for pair in zip(before, after, strict=True)]
    head = BYTES[work.dtype] * work.model.vocab_size * work.model.hidden_size // max(work.tensor.degree, 1)
    for rank, one in enumerate(most):
        waiting = head * (pipeline.losses(rank) - 1)
        if waiting > 0:
            said = f"{one.formula} + gradients of the head that wait for backward passes {human_bytes(waiting)}"
            most[rank] = one.model_copy(update={"value": one.value + waiting, "formula": said})
    return [pipeline.with_versions(one, rank, *about) for rank, one in enumerate(most)]


def _around_s(work: Training, machine: Machine) -> float:
    """Seconds in which the first weights are drawn and the last ones written, hashed and made durable."""
    drawn = DRAW_S * work.model.num_params / min(8, machine.num_threads)
    kept = checkpoint_bytes(work) if work.keeps_state else 0
    return drawn + commit_seconds(machine, work.num_models * work.saved_width * work.written_params + kept)


def _evaluation_s(work: Training, machine: Machine) -> float:
    """Seconds of all evaluations."""
    if not work.eval_sequences:
        return 0.0
    scored = _forward_s(work.model, work, machine) * work.eval_sequences / work.batch_size
    token = forward_seconds(work.model, machine, tokens=1, seq_len=work.seq_len, dtype=work.dtype).value
    return scored + work.sample_passes * token


def _forward_s(model: ModelDims, work: Training, machine: Machine) -> float:
    """Seconds of a forward pass of `model` over a rank's share of a step's sequences."""
    tokens = work.step_tokens // work.divided.num_ranks
    return forward_seconds(model, machine, tokens=tokens, seq_len=work.seq_len, dtype=work.dtype).value
