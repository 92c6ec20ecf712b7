"""Estimates of a measured serving run from facts: the inputs of `hone.cost.serving`, and the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hone.base.errors import FitError
from hone.base.figure import Estimate
from hone.cost.cache import LayerCache, page_bytes
from hone.cost.facts import ModelFacts
from hone.cost.memory import BYTES, serve_bytes
from hone.cost.serving import Batching, Serving, StepKind, Traffic, serving_seconds, touched_pages
from hone.measure.machine import Machine
from hone.model.facts import CheckpointFacts
from hone.ops.dispatch import Where, choose, triton_version
from hone.serve.paging.cache import cache_tensors, has_softcap
from hone.serve.sizing import Memory, cache_pages, sized, step_threads, work_bytes
from hone.serve.spec import EngineSpec
from hone.serve.workload import NUM_SAMPLES, SAMPLE_TOKENS

HELD_24, READ_24 = 6 / 16, 7 / 16
"""Shares of a 2:4 linear's dense bytes that are not held in memory, and not read by a decode step."""
_LOAD_BYTES_PER_S = 1e9  # reading, fusing and placing weights; files are usually in the page cache


def estimates(
    spec: EngineSpec, traffic: Traffic, models: Sequence[CheckpointFacts], machine: Machine
) -> dict[str, Estimate]:
    """Estimates of time_s, tokens_per_s, memory_growth_bytes and kv_cache_bytes. `models`: the model, then a draft model.

    A drafter's gain depends on how many guesses are accepted; none is assumed. Raises SpecError for a model that the engine
    cannot serve, FitError for requests longer than max_model_len.
    """
    spec = sized(spec, machine)
    formats = [one.dtype if spec.dtype == "auto" else spec.dtype for one in models]
    facts = models[0].config.facts()
    assert spec.max_num_seqs is not None and spec.max_num_batched_tokens is not None, "sized() fills both in"
    batching = Batching(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        block_size=spec.block_size,
        enable_prefix_caching=spec.enable_prefix_caching,
        static=spec.batching == "static",
    )
    one = pages_bytes(spec, models)
    weights = sum(model.loaded_bytes(dtype) for model, dtype in zip(models, formats))
    weights -= sparse_saving(spec, models[0], formats[0]) * HELD_24
    longest = spec.max_model_len or models[0].config.max_seq_len
    work = work_bytes(facts, spec, formats[0], machine.device)
    pages = cache_pages(spec, one, Memory.of(machine), longest, weights=weights, work=work)
    _must_hold(traffic, min(longest, pages * spec.block_size))
    serving = serving_of(spec, models[0], machine)
    run = serving_seconds(serving, traffic, batching)
    alone = serving.step_seconds(StepKind(1, 64, (), 1, 1)).value
    samples_s = (SAMPLE_TOKENS * NUM_SAMPLES + traffic.outputs[0]) * alone
    load_s = sum(model.weights_bytes for model in models) / _LOAD_BYTES_PER_S
    total = f"load {load_s:.2f} s + {run.formula} + samples {samples_s:.2f} s"
    tokens = sum(traffic.outputs)
    return {
        "time_s": Estimate(value=load_s + run.value + samples_s, unit="s", formula=total, bound=run.bound),
        "tokens_per_s": Estimate(value=tokens / run.value, unit="tokens/s", formula=run.formula, bound=run.bound),
        "kv_cache_bytes": Estimate(
            value=float((pages + 1) * one), unit="B", formula=f"{pages} pages and the null page"
        ),
        "memory_growth_bytes": _growth(spec, traffic, batching, facts, formats[0], weights, pages, one, machine),
    }


def pages_bytes(spec: EngineSpec, models: Sequence[CheckpointFacts]) -> int:
    """Bytes of a page, over all models, because a draft model shares the page numbers."""
    total = 0
    for model in models:
        stored = model.dtype if spec.dtype == "auto" else spec.dtype
        dtype = stored if spec.kv_cache_dtype == "auto" else spec.kv_cache_dtype
        total += page_bytes(cache_tensors(model.config), spec.block_size, dtype)
    return total


def serving_of(spec: EngineSpec, model: CheckpointFacts, machine: Machine) -> Serving:
    """How `model` runs on `machine`: its dtype, threads and kernels."""
    dtype, facts = model.dtype if spec.dtype == "auto" else spec.dtype, model.config.facts()
    calibrated = machine.calibration.threads if machine.calibration is not None else machine.num_cores
    return Serving(
        facts,
        machine,
        dtype,
        threads=step_threads(spec, facts.num_params, spec.max_num_seqs or 1, calibrated),
        in_place=reads_in_place_on(machine, cache_tensors(model.config), dtype, softcap=has_softcap(model.config)),
        captured=spec.drafter is None,
        read_bytes=_read_bytes(spec, model, dtype),
    )


def _read_bytes(spec: EngineSpec, model: CheckpointFacts, dtype: str) -> float | None:
    """Bytes of weights that a decode step reads where they are less than the dense ones; None where they are those."""
    facts = model.config.facts()
    if model.packed:
        return read_weights(facts, dtype, model.weights_bytes)
    matrices = sparse_saving(spec, model, dtype)
    return read_weights(facts, dtype, BYTES[dtype] * facts.num_params - matrices * READ_24) if matrices else None


def sparse_saving(spec: EngineSpec, model: CheckpointFacts, dtype: str) -> float:
    """Dense bytes of the linears of `model`'s layers if the spec has them run as 2:4, all of them; 0 where it does not.

    With `auto` nothing is expected: which linears are faster so is measured when the engine starts.
    """
    if spec.sparsity != "2:4" or model.packed:
        return 0.0
    linears = (one for index in range(model.config.num_layers) for one in model.config.linears(index).values())
    return BYTES[dtype] * float(sum(one.out_features * one.in_features for one in linears if one.experts is None))


def _must_hold(traffic: Traffic, max_model_len: int) -> None:
    """Raises FitError for requests longer than `max_model_len`: the run would not measure the work of its spec."""
    longest = max(prompt + output for prompt, output in zip(traffic.prompts, traffic.outputs, strict=True))
    if longest > max_model_len:
        raise FitError(
            f"a request has up to {longest} tokens with its prompt, max_model_len is {max_model_len}",
            fix="lower shared_prefix, prompt_tokens or output_tokens, or give the engine more pages",
        )


def _growth(
    spec: EngineSpec,
    traffic: Traffic,
    batching: Batching,
    facts: ModelFacts,
    dtype: str,
    weights: float,
    pages: int,
    one: int,
    machine: Machine,
) -> Estimate:
    """Weights + the pages that the run touches + the activations of one step."""
    if not machine.device.startswith("cuda"):  # untouched memory is not resident
        pages = min(pages, touched_pages(traffic, batching))
    most = max(prompt + output for prompt, output in zip(traffic.prompts, traffic.outputs))
    seqs = min(traffic.concurrency, batching.max_num_seqs)
    return serve_bytes(
        facts,
        weights_bytes=weights,
        kv_bytes=pages * one,
        max_tokens=min(batching.max_num_batched_tokens, traffic.concurrency * most),
        max_num_seqs=seqs,
        context_tokens=seqs * most,
        dtype=dtype,
        device=machine.device,
    )


def read_weights(facts: ModelFacts, dtype: str, stored: float) -> float | None:
    """Bytes of quantized weights that a step reads, of `stored` ones; None when they are stored in `dtype`."""
    if stored >= 0.9 * BYTES[dtype] * facts.num_params:
        return None
    embedding = 0 if facts.tie_embeddings else BYTES[dtype] * facts.vocab_size * facts.hidden_size
    return stored - embedding


def reads_in_place_on(machine: Machine, tensors: Sequence[LayerCache], dtype: str, *, softcap: bool = False) -> bool:
    """Whether `machine` is a GPU whose kernels read pages of `dtype` in place.

    `tensors`: `cache_tensors` of the model; `softcap`: its `has_softcap`.
    """
    if not machine.device.startswith("cuda"):
        return False
    gpu = machine.gpus[int(machine.device.partition(":")[2] or 0)]
    major, minor = map(int, gpu.capability.split("."))
    where = Where("cuda", (major, minor), gpu.num_multiprocessors, triton_version())
    page = {"dtype": getattr(torch, dtype), "page_dtype": getattr(torch, dtype), "rows": 1, "softcap": softcap}
    for layer in tensors:
        widths = {one.name: one.shape[-1] for one in layer}
        if layer and set(widths) != {"k", "v"}:
            return False
        if layer and choose("attend_paged", where, head_dim=widths["k"], v_dim=widths["v"], **page).backend != "triton":
            return False
    return True
