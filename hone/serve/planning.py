"""From an engine's spec, its models and its machine to the numbers that `hone.cost.serve` computes a run's estimates from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hone.base.errors import FitError
from hone.base.figure import Estimate
from hone.cost.cache import LayerCache, page_bytes
from hone.cost.memory import BYTES
from hone.cost.ranks import Split
from hone.cost.serve.adapters import AdapterWork
from hone.cost.serve.figures import HELD_24, READ_24, Measured, estimate, read_weights
from hone.cost.serve.offload import ExpertCopies, Offload
from hone.cost.serve.schedule import Batching, Traffic
from hone.cost.serve.serving import Serving
from hone.measure.machine import Machine
from hone.model.config import ModelConfig
from hone.model.drafters.folder import DrafterFacts
from hone.model.facts import CheckpointFacts
from hone.model.feed_forwards.swiglu import SwiGLU
from hone.model.mixers.attention import Attention
from hone.model.parallel.experts import even_slots, place_experts
from hone.model.parallel.local import check_split, stage_layers, vocabulary_rows
from hone.model.quantized.config import linear_of
from hone.ops.cpu.isa import cpu_isa
from hone.ops.cpu.rules import cpu_step
from hone.ops.dispatch import Where, choose, triton_version
from hone.parallel.place import Place
from hone.serve.adapters.layout import SlotLayout
from hone.serve.bench.workload import NUM_SAMPLES, SAMPLE_TOKENS
from hone.serve.kv_policies.policy import check_bits
from hone.serve.offload.budget import MemoryBudget, budget_of, check_cached, expert_bytes
from hone.serve.paging.cache import cache_tensors, has_softcap
from hone.serve.paging.scales import CacheFormat, cache_format, check_format
from hone.serve.sizing import (
    DeviceMemory,
    cache_pages,
    kept_of,
    sized,
    step_threads,
    widened_bytes,
    will_widen,
    work_bytes,
)
from hone.serve.spec import EngineSpec


def estimates(
    spec: EngineSpec,
    traffic: Traffic,
    models: Sequence[CheckpointFacts],
    machine: Machine,
    heads: DrafterFacts | None = None,
) -> dict[str, Estimate]:
    """Estimates of time_s, tokens_per_s, memory_growth_bytes and kv_cache_bytes. `models`: the model, then a draft model; `heads`: draft heads.

    A drafter's gain depends on how many guesses are accepted; none is assumed. Raises SpecError for a model that the engine
    cannot serve, FitError for requests longer than max_model_len.
    """
    spec = sized(spec, machine)
    models = [of_a_rank(spec, one) for one in models]
    formats = [one.dtype if spec.dtype == "auto" else spec.dtype for one in models]
    dims = models[0].config.dims()
    assert spec.max_num_seqs is not None and spec.max_num_batched_tokens is not None, "sized() fills both in"
    batching = Batching(
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        block_size=spec.block_size,
        enable_prefix_caching=spec.enable_prefix_caching,
        static=spec.batching != "continuous",
    )
    one = pages_bytes(spec, models)
    if heads is not None:
        one += page_bytes(heads.cache, spec.block_size, formats[0])
    budget = budget_on(spec, models[0], machine, one)
    weights = sum(model.loaded_bytes(dtype) for model, dtype in zip(models, formats))
    weights += 0 if heads is None else heads.num_params * BYTES[formats[0]]
    weights -= sparse_saving(spec, models[0], formats[0]) * HELD_24
    copies = expert_copies(spec, models[0], formats[0])
    if copies is not None:
        weights -= sum(size * (count - copies.num_cached) for count, _, size in copies.layers)
    longest = spec.max_model_len or models[0].config.max_seq_len
    adapters = adapter_work(spec, models[0], formats[0])
    weights += 0.0 if adapters is None else adapters.held_bytes
    widens = will_widen(models[0].loaded_bytes(formats[0]), dims, formats[0], machine)
    work = work_bytes(dims, spec, formats[0], machine.device, widens=widens)
    memory = DeviceMemory.of(machine)
    if not machine.device.startswith("cuda"):  # all ranks share it
        memory = memory._replace(free=memory.free / spec.num_ranks)
    most = kept_of(spec, models[0].config).most_pages(longest, spec.max_num_batched_tokens, spec.block_size)
    sizes = spec
    if budget is not None:
        weights = budget.ends + budget.offload.device_bytes
        sizes = budget.sized(spec, weights)
    pages = cache_pages(sizes, one, memory, most * spec.block_size, weights=weights, work=work)
    _must_hold(traffic, longest if most <= pages else min(longest, pages * spec.block_size))
    serving = serving_of(spec, models[0], machine, copies if budget is None else budget.offload)
    serving = replace(serving, adapters=adapters)
    measured = Measured(
        serving,
        traffic,
        replace(batching, num_pages=pages),
        weights_bytes=weights,
        read_bytes=sum(model.weights_bytes for model in models),
        num_pages=pages,
        page_bytes=one,
        sample_tokens=SAMPLE_TOKENS * NUM_SAMPLES + traffic.outputs[0],
        widened_bytes=widened_bytes(dims, spec.max_num_batched_tokens, formats[0]) if widens else 0.0,
    )
    return estimate(measured, machine)


def budget_on(
    spec: EngineSpec, model: CheckpointFacts, machine: Machine, page: int, memory: DeviceMemory | None = None
) -> MemoryBudget | None:
    """How `spec.gpu_memory` is divided for `model` on `machine`; None without it. `spec` is sized. Errors as `budget_of`."""
    if spec.gpu_memory is None:
        return None
    assert spec.max_num_batched_tokens is not None, "sized() fills it in"
    longest = spec.max_model_len or model.config.max_seq_len
    most = kept_of(spec, model.config).most_pages(longest, spec.max_num_batched_tokens, spec.block_size)
    return budget_of(spec, model, machine, page=page, longest_pages=most, memory=memory or DeviceMemory.of(machine))


def of_a_rank(spec: EngineSpec, model: CheckpointFacts) -> CheckpointFacts:
    """The dimensions of the part that one rank holds: of the pipeline stage with most bytes, the layers; of those, its heads."""
    if spec.num_ranks == 1:
        return model
    whole, size = model.config, spec.tensor_parallel_size
    check_split(whole, size, whole_experts=spec.enable_expert_parallel)
    layers = max(stage_layers(whole, spec.pipeline_parallel_size), key=len)
    if not spec.enable_expert_parallel:
        config = whole.local(size)
    else:
        slots = even_slots(whole, size, spec.eplb_config.num_redundant_experts)
        config = place_experts(whole, Place.of(0, size, spec.pipeline_parallel_size), slots)
    config = config.model_copy(
        update={
            "layers": tuple(config.layers[index] for index in layers),
            "vocab_size": vocabulary_rows(whole.vocab_size, size),
        }
    )
    share = config.num_params / whole.num_params
    return model.model_copy(update={"config": config, "weights_bytes": int(model.weights_bytes * share)})


def pages_bytes(spec: EngineSpec, models: Sequence[CheckpointFacts]) -> int:
    """Bytes of a page, over all models, because a draft model shares the page numbers."""
    total = 0
    for model in models:
        stored = model.dtype if spec.dtype == "auto" else spec.dtype
        kept = cache_format(spec.kv_cache_dtype, stored, model.quantization if model is models[0] else None)
        total += page_bytes(cache_tensors(model.config), spec.block_size, kept.dtype, fixed_scales=kept.fixed)
    return total


def expert_copies(spec: EngineSpec, model: CheckpointFacts, dtype: str) -> ExpertCopies | None:
    """The experts that `spec.expert_offload` keeps in host memory, whose weights are in `dtype` or as stored; None where it keeps none.

    Raises SpecError where the engine would.
    """
    num_cached = spec.expert_offload.num_cached_experts
    if num_cached is None:
        return None
    check_cached(model.config, num_cached)
    fed = [one.feed_forward for one in model.config.layers if one.feed_forward.sums_once]
    each = expert_bytes(model, dtype) / sum(one.num_experts for one in fed)
    return ExpertCopies(tuple((one.num_experts, one.router.visits(one.num_experts), each) for one in fed), num_cached)


def adapter_work(spec: EngineSpec, model: CheckpointFacts, dtype: str) -> AdapterWork | None:
    """The slots of `spec.lora`, and the adapters of its `lora_modules` at the largest rank; None without slots."""
    if spec.lora.max_loras is None:
        return None
    layout = SlotLayout.of(model.config, spec.lora.max_lora_rank)
    distinct = min(len(spec.lora.lora_modules), spec.lora.max_loras)
    return AdapterWork(distinct, BYTES[dtype] * float(layout.size), spec.lora.max_loras, len(layout.linears))


def serving_of(
    spec: EngineSpec, model: CheckpointFacts, machine: Machine, offload: Offload | ExpertCopies | None = None
) -> Serving:
    """How `model` runs on `machine`: its dtype, threads and kernels, and which of its weights are copied in every step."""
    streams = offload is not None and (isinstance(offload, ExpertCopies) or bool(offload.streamed))
    dtype, dims = model.dtype if spec.dtype == "auto" else spec.dtype, model.config.dims()
    tensors, kept = cache_tensors(model.config), cache_format(spec.kv_cache_dtype, dtype, model.quantization)
    check_format(kept.dtype, tensors, dtype, where_of(machine))
    check_bits(spec.kv_policy, kept.dtype)
    calibrated = machine.calibration.threads if machine.calibration is not None else machine.num_cores
    return Serving(
        dims,
        machine,
        dtype,
        threads=step_threads(spec, dims.num_params, spec.max_num_seqs or 1, calibrated),
        in_place=reads_in_place_on(machine, tensors, dtype, kept.dtype, softcap=has_softcap(model.config)),
        cache_width=_cache_width(tensors, kept),
        captured=not streams and (spec.drafter is None or "draft" not in spec.drafter.needs),
        read_bytes=_read_bytes(spec, model, dtype),
        split=Split(spec.tensor_parallel_size, spec.pipeline_parallel_size, machine.device, machine.processor),
        vocab_size=dims.vocab_size * spec.tensor_parallel_size,
        codes=_codes_on(machine, model, dtype),
        offload=offload if streams else None,
        compiled=not streams
        and kept.dtype == dtype
        and _keeps_all(spec, model)
        and compiles_on(machine, model.config, dtype),
    )


def _codes_on(machine: Machine, model: CheckpointFacts, dtype: str) -> str:
    """The recipe by which a GPU multiplies the layers' weights as codes of 8 bits (`hone.model.quantized.rounded_inputs`); "": it does not."""
    if not machine.device.startswith("cuda") or model.quantization is None or not model.packed:
        return ""
    found = linear_of(model.quantization, "model.layers.0.mlp.down_proj")
    scheme = None if found is None else found[1].get("scheme")
    recipe = "" if scheme is None else scheme.product_of_codes
    if scheme is None or not recipe:
        return ""
    sizes = {"rows": 512, "out_features": 1024, "in_features": 1024}
    case = {"dtype": getattr(torch, dtype), "blockwise": recipe == "blockwise", "integer": scheme.number == "int"}
    runs = choose("fp8_linear", where_of(machine), **sizes, **case).backend != "reference"
    return recipe if runs else ""


def _read_bytes(spec: EngineSpec, model: CheckpointFacts, dtype: str) -> float | None:
    """Bytes of weights that a decode step reads where they are less than the dense ones; None where they are those."""
    dims = model.config.dims()
    if model.packed:
        return read_weights(dims, dtype, model.weights_bytes, _looked_up(model, dtype))
    matrices = sparse_saving(spec, model, dtype)
    return read_weights(dims, dtype, BYTES[dtype] * dims.num_params - matrices * READ_24) if matrices else None


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


def _looked_up(model: CheckpointFacts, dtype: str) -> float:
    """Bytes of a number of the embedding as `model` stores it, without scales."""
    stored = None if model.quantization is None else linear_of(model.quantization, "model.embed_tokens")
    return BYTES[dtype] if stored is None else stored[1]["scheme"].bits / 8


def compiles_on(machine: Machine, config: ModelConfig, dtype: str) -> bool:
    """Whether decode steps of a model run as one compiled call on `machine`, a CPU like this one (`compiled_step.why_not`)."""
    page = {"dtype": getattr(torch, dtype), "page_dtype": getattr(torch, dtype), "rows": 1, "decode": True}
    if machine.device != "cpu" or not cpu_isa() or config.residual_multiplier != 1.0:
        return False
    for layer in config.layers:
        mixer = layer.mixer
        if layer.norms != "pre" or type(mixer) is not Attention or type(layer.feed_forward) is not SwiGLU:
            return False
        if mixer.softcap is not None or mixer.sinks or mixer.rotary_dim is not None or mixer.qk_norm_over != "head":
            return False
        widths = {"head_dim": mixer.head_dim, "v_dim": mixer.head_dim}
        if choose("attend_paged", Where("cpu", cpu=cpu_isa()), **widths, **page).backend != "compiled":
            return False
        if config.hidden_size % 32 or layer.feed_forward.intermediate_size % cpu_step(cpu_isa(), page["dtype"]):
            return False
    return True


def _keeps_all(spec: EngineSpec, model: CheckpointFacts) -> bool:
    """Whether layers attend to all that their own window lets them, whatever the KV policy."""
    return kept_of(spec, model.config).view(None) == (None, 0)


def _cache_width(tensors: Sequence[LayerCache], kept: CacheFormat) -> float:
    """Bytes that a cached number takes, with its part of a scale."""
    values = sum(one.num_values for layer in tensors for one in layer)
    return page_bytes(tensors, 1, kept.dtype, fixed_scales=kept.fixed) / values if values else BYTES[kept.dtype]


def where_of(machine: Machine) -> Where:
    """What the choice of kernels depends on, of `machine`."""
    if not machine.device.startswith("cuda"):
        return Where()
    gpu = machine.gpus[int(machine.device.partition(":")[2] or 0)]
    # A GPU without a CUDA capability, such as AMD's in a plan, has none of the kernels that ask for one.
    major, _, minor = gpu.capability.partition(".")
    return Where("cuda", (int(major or 0), int(minor or 0)), gpu.num_multiprocessors, triton_version())


def reads_in_place_on(
    machine: Machine, tensors: Sequence[LayerCache], dtype: str, page_dtype: str | None = None, *, softcap: bool = False
) -> bool:
    """Whether `machine` is a GPU whose kernels read pages of `page_dtype` (None: `dtype`, that of the queries) in place.

    `tensors`: `cache_tensors` of the model; `softcap`: its `has_softcap`.
    """
    if not machine.device.startswith("cuda"):
        return False
    where = where_of(machine)
    held = getattr(torch, page_dtype or dtype)
    page = {"dtype": getattr(torch, dtype), "page_dtype": held, "rows": 1, "softcap": softcap}
    for layer in tensors:
        widths = {one.name: one.shape[-1] for one in layer}
        if layer and set(widths) != {"k", "v"}:
            return False
        if layer and choose("attend_paged", where, head_dim=widths["k"], v_dim=widths["v"], **page).backend != "triton":
            return False
    return True
