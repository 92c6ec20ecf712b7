"""The work of a compression and the estimates that follow from it: exact sizes, seconds, memory."""

from __future__ import annotations

from typing import Any

from hone.base.figure import Estimate, human_bytes
from hone.base.plan import DISK, MEMORY
from hone.compress.allocations.base import Budget
from hone.compress.allocations.planning import seconds
from hone.compress.plans.calibrated import Calibrated
from hone.compress.plans.matrices import every_matrix, paired, steps_of
from hone.compress.spec import CompressSpec
from hone.compress.step import Targets
from hone.compress.structured import chain
from hone.compress.targets import Linear
from hone.cost.compress.compression import Compression, MatrixWork, compress_bytes
from hone.cost.files import beside_bytes
from hone.measure.machine import Machine
from hone.model.facts import CheckpointFacts


def work_of(
    spec: CompressSpec,
    whole: CheckpointFacts,
    model: CheckpointFacts,
    targets: Targets,
    shards: tuple[int, ...],
    calibrated: Calibrated | None,
    stored_width: int,
    dtype: str,
    embedding: Linear | None = None,
) -> Compression:
    """The work of compressing the linears in `targets` of `model`, which is the model `whole` as the first steps leave it.

    `shards`: bytes of every file; `stored_width`: bytes of a weight in the checkpoint; `dtype` of the forward passes.
    """
    layers = tuple(
        tuple(
            MatrixWork(
                one.rows,
                one.columns,
                tuple(step.work(one.rows, one.columns) for step in steps_of(spec, one)),
                1.0 if one.expert is None else one.share,
            )
            for one in linears
        )
        for linears in every_matrix(targets, embedding)
    )
    count = model.config.num_layers
    num_sequences, seq_len, num_spare = calibrated or (0, 0, 0)
    once = {"stored_width": stored_width, "dtype": dtype, "batch_size": spec.batch_size}
    more = {"num_sequences": num_sequences, "seq_len": seq_len} if spec.calibrated_steps else {}
    probes, differentiated = 0, min(spec.gradient_sequences, num_sequences)
    if spec.allocation is not None:
        probes = spec.allocation.probes(sum(map(len, targets[:count])))
        differentiated += min(spec.allocation.differentiated, spec.allocation.num_sequences, num_sequences)
    if spec.quantizer is not None:
        more |= {"range_bytes": spec.quantizer.range_bytes, "rounding_bytes": spec.quantizer.rounding_bytes}
    return Compression(
        model.config.dims(),
        layers[:count],
        shards,
        head=layers[count : len(targets)],
        embedding=layers[len(targets) :],
        **once,
        **more,
        measured=chain.measured(whole.config, spec.model_steps, num_sequences, seq_len, **once),
        paired=paired(spec),
        ends_bytes=sum(step.ends_bytes for step in spec.model_steps),
        cache_bytes=0.0 if spec.cache is None else spec.cache.range_bytes(model.config),
        check_sequences=0 if spec.reshapes else num_spare,
        probes=probes,
        differentiated=differentiated,
    )


def estimates_of(
    spec: CompressSpec,
    whole: CheckpointFacts,
    model: CheckpointFacts,
    machine: Machine,
    work: Compression,
    budget: Budget | None,
) -> dict[str, Estimate]:
    """Exact sizes; seconds and memory; figures that follow from the steps' options."""
    size, params = sum(work.shard_bytes) + work.adapter_bytes, model.config.num_params
    beside = beside_bytes(model.config.vocab_size)
    options: dict[str, Any] = {"formula": "headers, codes, scales and unchanged tensors", "tolerance": 0.0}
    if budget is not None:
        size = budget.model_bytes
        options = {"formula": "the budget, of which a choice of bits leaves little unused", "tolerance": 0.05}
    bits = {"value": 8 * size / params, "unit": "bits", "formula": "8 x bytes / parameters", **options}
    found = {
        "model_bytes": Estimate(value=size, unit="B", **options),
        "bits_per_weight": Estimate(**bits),
        "time_s": seconds(machine, work, spec.allocation),
        MEMORY: compress_bytes(machine, work),
        DISK: Estimate(
            value=size + work.adapter_bytes + beside,
            unit="B",
            formula=f"the weights{', an adapter twice' if work.adapter_bytes else ''}; tokenizer, config, index, rows {human_bytes(beside)}",
        ),
    }
    if params != whole.config.num_params:
        found["num_params"] = Estimate(value=params, unit="parameters", formula="the new config", tolerance=0.0)
    if spec.quantizer is None:
        for step in spec.layer_steps:
            found.update(step.figures())
    return found
