"""What a compression plans before it runs: the checks of its steps and its matrices, sizes, seconds and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hone.base.errors import SpecError
from hone.base.plan import MEMORY, Facts, Plan, check_order, need
from hone.compress.allocations.base import Budget
from hone.compress.allocations.planning import assigned
from hone.compress.plans.calibrated import CALIBRATE, Calibrated, calibrated_of
from hone.compress.plans.matrices import check_targets, every_matrix, hadamards_of, rest_dtype, written_by
from hone.compress.plans.to_cost import compression_of
from hone.compress.sizes import entries, shard_sizes, untied
from hone.compress.spec import CompressSpec
from hone.compress.statistics import STATISTICS
from hone.compress.step import Targets, storing
from hone.compress.structured import chain
from hone.compress.targets import Linear, check_stacked, has_head, select
from hone.compress.targets import embedding as embedding_of
from hone.compress.written import engines
from hone.compress.written.engines import Written
from hone.compress.written.result import quantization_config
from hone.cost.compress.decoding import KEPT, decoding_note, kept_per_token
from hone.cost.compress.figures import estimate
from hone.cost.energy import with_energy
from hone.feed.facts import DataFacts
from hone.measure.machine import Machine
from hone.model.facts import CheckpointFacts
from hone.model.families import FAMILIES

WAYS = {MEMORY: ("compute on another device", "free some memory", "compress on a machine with more")}
"""Ways out when memory is too small, besides `remedies`."""


def remedies(spec: CompressSpec) -> list[list[tuple[str, str]]]:
    """Changes of the compression `spec` that may need less memory; see `Stage.remedies`."""
    smaller = {
        name: [str(getattr(spec, name) // part) for part in (2, 4, 8, 16) if getattr(spec, name) >= part]
        for name in ("batch_size", "num_sequences")
    }
    return [*([(name, value) for value in values] for name, values in smaller.items()), [("compute_dtype", "bfloat16")]]


class CompressPlan(Plan):
    """A plan with the engine's job: linears by layer, dtype of the forward passes, calibration."""

    targets: tuple[tuple[Any, ...], ...]
    embedding: Any = None
    """The embedding as a matrix, where it is compressed."""
    compute_dtype: str
    calibrated: Calibrated | None
    budget: Budget | None


def planned(spec: CompressSpec, facts: Mapping[str, Facts], machine: Machine) -> CompressPlan:
    """See `hone.compress.stage.Compress.plan`."""
    assert spec.steps, "a goal is planned by Stage.priced, which finds the steps"
    model = need(facts, "model", CheckpointFacts)
    data = need(facts, "data", DataFacts) if "data" in facts else None
    check_model(spec, model)
    calibrated = calibrated_of(spec, model, data)
    _check_inputs(spec, calibrated is not None)
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
    work = compression_of(spec, whole, model, targets, tuple(made), calibrated, dtype.itemsize, compute, embedding)
    work = replace(work, adapter_bytes=adapter_bytes)
    hadamards = hadamards_of(spec, model.config, targets)
    quantization = quantization_config(
        model.config, targets, planned, model.dtype, hadamards, cache and cache.cache_scheme, embedding
    )
    update = {"where": f"compressed {model.where}", "quantization": quantization, "config": config}
    update["weights_bytes"] = sum(made) + work.adapter_bytes
    sizes = {
        "num_params": model.config.num_params,
        "given_params": whole.config.num_params,
        "vocab_size": model.config.vocab_size,
    }
    limited = spec.allocation is not None and spec.allocation.max_kl is not None
    estimates = estimate(work, machine, **sizes, budget=None if budget is None else budget.model_bytes, limited=limited)
    for step in spec.layer_steps if spec.quantizer is None else ():
        estimates.update(step.figures())
    if spec.converts:
        estimates[KEPT] = kept_per_token(whole.config.dims(), model.config.dims(), dtype.itemsize)
    return CompressPlan(
        estimates=with_energy(estimates, machine),
        facts=model.model_copy(update=update),
        ways=WAYS,
        targets=targets,
        embedding=embedding,
        compute_dtype=compute,
        calibrated=calibrated,
        budget=budget,
        notes=notes_of(spec, whole, model, targets, embedding, written, dtype.itemsize),
    )


def check_model(spec: CompressSpec, model: CheckpointFacts) -> None:
    """Raises SpecError for a model that is not compressed, or not by these steps."""
    model.config.must_predict_tokens(model.where)
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
        raise SpecError(
            f"{model.where} has adapters around its linears",
            fix="compress the model without them, or what hone merge makes of it",
        )


def _check_inputs(spec: CompressSpec, calibrated: bool) -> None:
    """Raises SpecError where a step needs what the steps before and the calibration, if there is one, do not give."""
    given = {"weights:float"} | (STATISTICS.keys() if calibrated else frozenset())
    applied = (*spec.steps,) if spec.allocation is None else (spec.allocation, *spec.steps)
    check_order(applied, frozenset(given), dict.fromkeys(STATISTICS, CALIBRATE))
    quantizer = spec.quantizer
    if quantizer is not None and not calibrated and quantizer.input_statistics:
        raise SpecError(
            f"{quantizer.kind} with activations {quantizer.activations} needs calibration inputs",
            fix="add data: NAME OR FOLDER, or set calibration_text=FILE",
        )


def _rewritten(spec: CompressSpec, model: CheckpointFacts, calibrated: bool) -> CheckpointFacts:
    """The facts of the dense model that the steps of the phase "model" leave. Raises SpecError where they cannot."""
    for step in spec.model_steps:
        if not calibrated and step.passes(model.config) is not None:
            raise SpecError(f"{step.kind} measures importances on calibration inputs", fix=CALIBRATE)
    return model.model_copy(update={"config": chain.reshape(model.config, spec.model_steps)})


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
    width: int,
) -> tuple[str, ...]:
    """What rules give, how the head of the model `whole` and a compressed embedding are stored, what that means to engines, and what
    conversions change in decoding at `width` bytes a number."""
    found = () if spec.quantizer is None else spec.quantizer.lines(every_matrix(targets, embedding))
    if spec.converts:
        found += (decoding_note(whole.config.dims(), model.config.dims(), width),)
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
