"""The sizes of a training from which activation checkpointing is chosen, and the training with what was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from hone.cost.activations.segments import Segment, keep_all, layer_bytes
from hone.cost.dims import LayerDims
from hone.cost.memory import BYTES
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.training import Training
from hone.measure.machine import Machine
from hone.train.activation_checkpointing.base import ActivationCheckpointing, Segments, Sizes


def sizes_of(work: Training, machine: Machine) -> Sizes:
    """The sizes of `work` on `machine`, by the estimates that its plan shows."""
    dims, on_gpu = work.part, machine.device.startswith("cuda")
    width, tokens, num = BYTES[work.dtype], work.micro_batch_tokens, work.model.num_layers
    mask = work.seq_len if work.packed and not (on_gpu and width < 4) else 0
    layers = [dims.layers[index % dims.num_layers] for index in range(num)]

    @cache
    def growth(segments: Segments) -> float:
        return growth_bytes(replace(work, segments=segments), machine.device).value

    @cache
    def seconds(segments: Segments) -> float:
        return step_seconds(replace(work, segments=segments), machine).value

    whole, known = keep_all(num), {}

    def more(index: int, layer: LayerDims, **how: str) -> float:
        """Seconds more of a step when layer `index` is recomputed, of one micro-batch."""
        key = (layer, *how.values())
        if key not in known:
            one = Segment(index, index + 1, True, **how)  # type: ignore[arg-type]
            changed = (*whole[:index], one, *whole[index + 1 :])
            known[key] = max(seconds(changed) - seconds(whole), 0.0) / work.gradient_accumulation_steps
        return known[key]

    sequences = work.micro_batch_tokens * work.gradient_accumulation_steps // work.seq_len
    now = work.gradient_accumulation_steps

    def finer(segments: Segments) -> Iterator[tuple[int, float]]:
        for count in range(now + 1, sequences + 1):
            if sequences % count == 0 and work.pipeline is None:  # a schedule is of so many micro-batches
                smaller = replace(work, segments=segments, gradient_accumulation_steps=count)
                yield count, growth_bytes(smaller, machine.device).value

    return Sizes(
        layers=tuple(layer_bytes(one, dims.hidden_size, tokens, width, mask, fp8=work.keeps_codes) for one in layers),
        forward_s=tuple(more(index, one) for index, one in enumerate(layers)),
        replay_s=tuple(more(index, one, saves="products") for index, one in enumerate(layers)),
        growth=growth,
        seconds=seconds,
        free_bytes=machine.free_memory_bytes,
        elsewhere=on_gpu,
        finer=finer,
    )


def fitted(work: Training, policy: ActivationCheckpointing, machine: Machine) -> Training:
    """`work` with the segments that `policy` chooses for it. Raises SpecError or FitError as the policy does."""
    sizes = None if policy.by_rule else sizes_of(work, machine)  # which take long where stages are simulated
    return replace(work, segments=policy.segments(work.model.num_layers, sizes))


def reasons(work: Training, policy: ActivationCheckpointing, machine: Machine) -> tuple[str, ...]:
    """Lines for the plan of `work`: what `policy` chose by itself, and why."""
    return () if policy.by_rule else policy.notes(work.model.num_layers, sizes_of(work, machine))
