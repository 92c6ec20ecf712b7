"""The compression of `hone.cost.compress` that a compress stage is: from its spec and its model's matrices."""

from __future__ import annotations

from dataclasses import replace

from hone.compress.allocations.base import Allocation
from hone.compress.plans.calibrated import Calibrated
from hone.compress.plans.matrices import every_matrix, paired, steps_of
from hone.compress.spec import CompressSpec
from hone.compress.step import Targets
from hone.compress.structured import chain
from hone.compress.targets import Linear
from hone.cost.compress.compression import Compression, MatrixWork
from hone.model.facts import CheckpointFacts


def compression_of(
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
        more["codes"] = spec.quantizer.scheme(model.config.hidden_size).product_of_codes
    found = Compression(
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
        check_sequences=num_spare,
        reshaped=spec.reshapes,
        probes=probes,
        differentiated=differentiated,
    )
    return found if spec.allocation is None else replace(found, sensitivities=_sensitivities(spec.allocation, found))


def _sensitivities(allocation: Allocation, work: Compression) -> Compression:
    """Measuring what each matrix of the layers of `work` loses with each candidate of bits: no more than statistics and products."""
    layers = tuple(
        tuple(
            MatrixWork(one.rows, one.columns, (allocation.work(one.rows, one.columns),), one.share) for one in matrices
        )
        for matrices in work.layers
    )
    return Compression(
        work.dims,
        layers,
        (0,) * len(work.shard_bytes),
        work.stored_width,
        work.dtype,
        num_sequences=min(work.num_sequences, allocation.num_sequences),
        seq_len=work.seq_len,
        batch_size=work.batch_size,
        paired=work.paired,
        ends_bytes=work.ends_bytes,
        adapter_bytes=work.adapter_bytes,
        embedding=work.embedding,
    )
