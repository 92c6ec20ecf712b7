"""What a compression plans before it runs: its calibration sequences, sizes, seconds and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hone.base.errors import SpecError
from hone.base.figure import Estimate, human_bytes
from hone.base.plan import DISK, MEMORY, Facts, Plan, check_order, need
from hone.compress import fitting
from hone.compress.allocations.base import Budget, candidates
from hone.compress.allocations.planning import assigned, seconds
from hone.compress.sizes import entries, shard_sizes, untied
from hone.compress.spec import CompressSpec
from hone.compress.statistics import PAIRED, STATISTICS
from hone.compress.step import Step, Targets, giving, storing
from hone.compress.structured import chain
from hone.compress.targets import EMBEDDED, HEAD, Linear, check_stacked, has_head, matrix_name, select
from hone.compress.targets import embedding as embedding_of
from hone.compress.written import engines
from hone.compress.written.engines import Written
from hone.compress.written.result import quantization_config
from hone.cost.compress import Compression, MatrixWork, compress_bytes
from hone.cost.energy import with_energy
from hone.cost.files import beside_bytes
from hone.feed import plain as texts
from hone.feed.facts import DataFacts
from hone.measure.machine import Machine
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.model.families import FAMILIES

DEFAULT_SEQ_LEN = 512
"""Default tokens of a calibration sequence for models with a longer context."""

TEXT_BYTES_PER_TOKEN = 3.5
"""Bytes of text per token, to estimate the number of sequences of a text before it is encoded."""


WAYS = {MEMORY: ("compute on another device", "free some memory", "compress on a machine with more")}
"""Ways out when memory is too small, besides `remedies`."""


def remedies(spec: CompressSpec) -> list[list[tuple[str, str]]]:
    """Changes of the compression `spec` that may need less memory; see `Stage.remedies`."""
    smaller = {
        name: [str(getattr(spec, name) // part) for part in (2, 4, 8, 16) if getattr(spec, name) >= part]
        for name in ("batch_size", "num_sequences")
    }
    return [*([(name, value) for value in values] for name, values in smaller.items()), [("compute_dtype", "bfloat16")]]


_CALIBRATE = "give calibration inputs: set calibration_text=FILE, or give data that the model was trained on as data (--from.data=FOLDER)"


class Calibrated(NamedTuple):
    """Calibration sequences, their tokens, and other sequences for the check."""

    num_sequences: int
    seq_len: int
    num_spare: int = 0


class CompressPlan(Plan):
    """A plan with the engine's job: linears by layer, dtype of the forward passes, calibration."""

    targets: tuple[tuple[Any, ...], ...]
    embedding: Any = None
    """The embedding as a matrix, where it is compressed."""
    compute_dtype: str
    calibrated: Calibrated | None
    budget: Budget | None
    chosen: Any = None
    """The spec with the steps that `fit` or `target_latency` chose; None when the steps were given."""


def planned(spec: CompressSpec, facts: Mapping[str, Facts], machine: Machine) -> CompressPlan:
    """See `hone.compress.stage.Compress.plan`."""
    model = need(facts, "model", CheckpointFacts)
    data = need(facts, "data", DataFacts) if "data" in facts else None
    _check_model(spec, model)
    calibrated = calibrated_of(spec, model, data)
    if not spec.steps:
        chosen, plan, why = fitting.choose(
            spec, model, machine, lambda spec: spec.plan(facts, machine), calibrated is not None
        )
        return plan.model_copy(update={"chosen": chosen, "notes": why})
    given = {"weights:float"} | (STATISTICS.keys() if calibrated is not None else frozenset())
    applied = (*spec.steps,) if spec.allocation is None else (spec.allocation, *spec.steps)
    check_order(applied, frozenset(given), dict.fromkeys(STATISTICS, _CALIBRATE))
    quantizer = spec.quantizer
    if quantizer is not None and calibrated is None and quantizer.input_statistics:
        raise SpecError(
            f"{quantizer.kind} with activations {quantizer.activations} needs calibration inputs",
            fix="add data: NAME OR FOLDER, or set calibration_text=FILE",
        )
    whole, model = model, _rewritten(spec, model, calibrated is not None)
    cache, storage = spec.cache, storing(spec.steps)
    if cache is not None:
        method = "compressed-tensors" if storage is None else storage.method(model.config.hidden_size)
        cache.check_cache(model.config, method, calibrated=calibrated is not None)
    targets, embedding = ((),) * model.config.num_layers, None
    if spec.layer_steps:
        targets = select(model.config, spec.targets, spec.ignore)
        embedding = embedding_of(model.config, spec.targets, spec.ignore)
    model = with_head(model, targets)
    check_targets(spec, targets, embedding)
    written = written_by(spec, model.config, targets, embedding)
    engines.check(spec.engine, written)
    dtype = getattr(torch, model.dtype)
    before = entries(whole, model.config if spec.reshapes else None) | untied(whole, model)
    if cache is not None:
        before |= cache.cache_entries(model.config, dtype)
    planned, budget = assigned(
        spec.allocation,
        storage,
        before,
        targets,
        rest_dtype(spec),
        dtype,
        model.where,
        embedding,
    )
    method = None if storage is None else storage.method(model.config.hidden_size)
    stacked = FAMILIES[model.config.family].stacked if method in (None, "mxfp4") else {}
    if storage is not None and method == "mxfp4":
        check_stacked(model.config, targets)
    made = shard_sizes(before, targets, planned, rest_dtype(spec), dtype, embedding, stacked)
    compute = spec.compute_dtype
    if compute == "auto":
        compute = "bfloat16" if machine.device.startswith("cuda") else "float32"
    config, adapter_bytes = model.config, 0
    for step in spec.steps:
        config, more = step.planned(config, targets, dtype)
        adapter_bytes += more
    work = work_of(spec, whole, model, targets, tuple(made), calibrated, dtype.itemsize, compute, embedding)
    work = replace(work, adapter_bytes=adapter_bytes)
    hadamards = hadamards_of(spec, model.config, targets)
    quantization = quantization_config(
        model.config, targets, planned, model.dtype, hadamards, cache and cache.cache_scheme, embedding
    )
    update = {"where": f"compressed {model.where}", "quantization": quantization, "config": config}
    update["weights_bytes"] = sum(made) + work.adapter_bytes
    return CompressPlan(
        estimates=with_energy(estimates_of(spec, whole, model, machine, work, budget), machine),
        facts=model.model_copy(update=update),
        ways=WAYS,
        targets=targets,
        embedding=embedding,
        compute_dtype=compute,
        calibrated=calibrated,
        budget=budget,
        notes=notes_of(spec, whole, model, targets, embedding, written),
    )


def _check_model(spec: CompressSpec, model: CheckpointFacts) -> None:
    """Raises SpecError for a model that is not compressed, or not by these steps."""
    if model.quantization is not None and model.quantization.get("quant_method") == "low_rank":
        raise SpecError(f"{model.where} stores low-rank factors", fix="compress the checkpoint it was made from")
    if model.quantization is not None and not spec.requantize:
        raise SpecError(
            f"{model.where} is quantized already ({model.quantization.get('quant_method')})",
            fix="compress the checkpoint it was made from, or set requantize=true to dequantize its weights first, "
            "which adds the errors of both",
        )
    for step in spec.steps:
        step.check_model(model.config)
    if model.config.adapters:
        raise SpecError(f"{model.where} has adapters around its linears", fix="compress the model without them")


def _rewritten(spec: CompressSpec, model: CheckpointFacts, calibrated: bool) -> CheckpointFacts:
    """The facts of the dense model that the steps of the phase "model" leave. Raises SpecError where they cannot."""
    for step in spec.model_steps:
        if not calibrated and step.passes(model.config) is not None:
            raise SpecError(f"{step.kind} measures importances on calibration inputs", fix=_CALIBRATE)
    return model.model_copy(update={"config": chain.reshape(model.config, spec.model_steps)})


def calibrated_of(spec: CompressSpec, model: CheckpointFacts, data: DataFacts | None) -> Calibrated | None:
    """Number and length of the sequences; None without calibration. Raises SpecError for an unusable source."""
    if data is not None and spec.calibration_text is not None:
        raise SpecError("both the role data and calibration_text are given", fix="give one of them")
    if data is None and spec.calibration_text is None:
        return None
    borrowing = [index for index, layer in enumerate(model.config.layers) if layer.mixer.reuses_kv]
    if borrowing:
        raise SpecError(
            f"layer {borrowing[0]} uses the keys of another layer, and calibration runs one layer at a time",
            fix="compress without calibration: kind=rtn, no data and no calibration_text",
        )
    longest = model.config.max_seq_len
    seq_len = spec.seq_len or min(longest, DEFAULT_SEQ_LEN)
    if seq_len > longest:
        raise SpecError(
            f"seq_len {seq_len} is longer than the model's context of {longest}", fix=f"use {longest} or less"
        )
    if data is None:
        size = texts.num_bytes(str(spec.calibration_text), "calibration_text")
        there = max(int(size / TEXT_BYTES_PER_TOKEN / seq_len), 1)
    else:
        if None not in (data.tokenizer, model.tokenizer) and data.tokenizer != model.tokenizer:
            raise SpecError(
                f"the tokens in {data.where} were made with another tokenizer than {model.where}'s",
                fix="give the data the model was trained on, or calibration_text=FILE, which is encoded anew",
            )
        there = max(data.split("train").num_sequences(seq_len), 1)
    count = min(spec.num_sequences, there)
    return Calibrated(count, seq_len, min(spec.check_sequences, there - count))


def with_head(model: CheckpointFacts, targets: Targets) -> CheckpointFacts:
    """The model with a head apart from its embedding, if the head is compressed."""
    if not (model.config.tie_embeddings and has_head(targets)):
        return model
    return model.model_copy(update={"config": model.config.model_copy(update={"tie_embeddings": False})})


def notes_of(
    spec: CompressSpec,
    whole: CheckpointFacts,
    model: CheckpointFacts,
    targets: Targets,
    embedding: Linear | None,
    written: Written,
) -> tuple[str, ...]:
    """What rules give, how the head of the model `whole` and a compressed embedding are stored, and what that means to engines."""
    found = () if spec.quantizer is None else spec.quantizer.lines(_with(targets, embedding))
    if whole.config.tie_embeddings and not model.config.tie_embeddings and has_head(targets):
        other = "which stays as it is" if embedding is None else "which is quantized, too"
        found += (f"lm_head is tied to the embedding: the compressed head is stored beside it, {other}",)
    if embedding is None:
        return found
    if model.config.tie_embeddings:
        found += ("the embedding and the head that is tied to it are one quantized matrix",)
    if any(step.prunes for step in spec.layer_steps):
        found += ("the embedding is quantized and not pruned",)
    if engines.dequantizes(written):
        why = "" if engines.alike(written) else ", and where all matrices have one scheme: not this folder"
        found += (
            f"transformers loads this embedding only with CompressedTensorsConfig(dequantize=True){why}; hone loads it packed",
        )
    return found


def _with(targets: Targets, embedding: Linear | None) -> Targets:
    """The matrices of all layers, then the embedding, if it is compressed."""
    return targets if embedding is None else (*targets, (embedding,))


def check_targets(spec: CompressSpec, targets: Targets, embedding: Linear | None) -> None:
    """Raises SpecError where the steps cannot work on a linear of `targets` or on the embedding, or rules fit none."""
    if spec.quantizer is not None:
        spec.quantizer.check_targets(_with(targets, embedding))
    elif embedding is not None:
        raise SpecError(
            f"targets name the embedding, and {', '.join(step.kind for step in spec.layer_steps)} works on linears alone",
            fix="add a quantizer to the steps, as {kind: rtn, bits: 8}, or leave embed_tokens out of targets",
        )
    if spec.gradient_sequences and has_head(targets):
        raise SpecError(
            f"observer {spec.quantizer.observer.kind} reads gradients of the inputs of layers, not of lm_head's",
            fix="use observer mse, or leave it unchanged: ignore=['lm_head']",
        )
    for index, linears in enumerate(_with(targets, embedding)):
        for linear in linears:
            for step in possible_steps(spec, linear):
                step.check_linear(matrix_name(index, linear.path), linear)


def steps_of(spec: CompressSpec, linear: Linear) -> tuple[Step, ...]:
    """The steps of a matrix, the quantizer with the options that it has for it; of the embedding that one alone."""
    names = [name for name, _ in linear.modules]
    if linear.path == EMBEDDED:
        return (spec.quantizer.of_matrix(names).of_embedding(),)
    return tuple(step.of_matrix(names) for step in spec.layer_steps)


def possible_steps(spec: CompressSpec, linear: Linear) -> tuple[Step, ...]:
    """The steps of a matrix, the quantizer with each choice of bits that it may get."""
    if spec.allocation is None or linear.path in (HEAD, EMBEDDED):
        return steps_of(spec, linear)
    quantizer = spec.quantizer
    others = (step for step in spec.layer_steps if step is not quantizer)
    return (*others, *candidates(quantizer, spec.allocation.bits).values())


def written_by(spec: CompressSpec, config: ModelConfig, targets: Targets, embedding: Linear | None = None) -> Written:
    """What an engine has to load: every scheme that a matrix may get."""
    schemes = (
        (matrix_name(index, linear.path), step.scheme(linear.columns), linear.columns)
        for index, linears in enumerate(_with(targets, embedding))
        for linear in linears
        for step in possible_steps(spec, linear)
    )
    return Written(
        config,
        tuple((name, scheme, columns) for name, scheme, columns in schemes if scheme is not None),
        spec.cache and spec.cache.cache_scheme,
        *(step and step.kind for step in (giving(f"weights:{what}", spec.steps) for what in ("low_rank", "corrected"))),
        bool(hadamards_of(spec, config, targets)),
    )


def hadamards_of(spec: CompressSpec, config: ModelConfig, targets: Targets) -> dict[str, int]:
    """Sizes of the Hadamard matrices that multiply inputs, by the linear's name."""
    return {name: size for step in spec.model_steps for name, size in step.hadamards(config, targets).items()}


def paired(spec: CompressSpec) -> bool:
    """Whether a step needs statistics of the inputs in the model that is not compressed."""
    return any(step.needs & PAIRED for step in spec.steps)


def rest_dtype(spec: CompressSpec) -> torch.dtype | None:
    """Dtype of the stored matrices outside the layers; None keeps theirs."""
    return None if spec.rest_dtype == "keep" else getattr(torch, spec.rest_dtype)


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
        for linears in _with(targets, embedding)
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
