"""An engine's sizes from its spec, its model and its device: sequences, tokens per step, pages of the cache, threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch
from torch import nn

from hone.base.errors import FitError
from hone.base.figure import human_bytes
from hone.cost.dims import ModelDims
from hone.cost.memory import BYTES, serve_bytes
from hone.measure.machine import Machine
from hone.model.config import ModelConfig
from hone.model.linear import ExpertLinears
from hone.ops.dispatch import locate
from hone.ops.moe.rules import WIDENED_BYTES, WIDENED_FROM
from hone.serve import KV_POLICIES
from hone.serve.kv_policies.policy import KeptTokens, KVPolicy
from hone.serve.spec import EngineSpec

_SMALL_PARAMS, _SMALL_FLOPS = 8_000_000, 4e9
"""Model and step up to which one CPU thread is faster than several; measured on two cores, idle and busy."""

GPU_SEQS, GPU_TOKENS = 512, 8192
"""Defaults of a server: a step of that many sequences saturates a GPU's products, and a prefill chunk of that many tokens
takes a few hundred milliseconds at most. (vLLM: 256 to 1,024 sequences, 2,048 to 16,384 tokens.)"""

SMALL_GPU_BYTES, SMALL_GPU_SEQS = 40 << 30, 256
"""Defaults of GPUs with less memory, which hold the caches of fewer sequences."""

GPU_BLOCK_SIZE, CPU_BLOCK_SIZE = 64, 16
"""Tokens in a page. On a GPU a block of keys that attention reads at once lies in one page, with one address."""

CORE_SEQS, CORE_TOKENS = 32, 512
"""The same per CPU core, up to a GPU's: beyond that a step only takes longer."""


def sized(spec: EngineSpec, machine: Machine) -> EngineSpec:
    """`spec` with `max_num_seqs`, `max_num_batched_tokens` and `block_size` filled in for `machine.device`."""
    block_size = GPU_BLOCK_SIZE if machine.device.startswith("cuda") else CPU_BLOCK_SIZE
    if machine.device.startswith("cuda"):
        gpu = machine.gpus[int(machine.device.partition(":")[2] or 0)]
        seqs = GPU_SEQS if gpu.memory_bytes >= SMALL_GPU_BYTES else SMALL_GPU_SEQS
        tokens = GPU_TOKENS
    else:
        seqs = min(CORE_SEQS * machine.num_cores, GPU_SEQS)
        tokens = min(CORE_TOKENS * machine.num_cores, GPU_TOKENS)
    tokens = spec.max_num_batched_tokens or max(tokens, spec.max_num_seqs or 0)
    seqs = spec.max_num_seqs or min(seqs, tokens)
    sizes = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "block_size": spec.block_size or block_size}
    return spec.model_copy(update=sizes)


def kept_of(spec: EngineSpec, config: ModelConfig) -> KeptTokens:
    """What the KV policy of `spec` keeps of a sequence. Raises SpecError for a model with which it cannot work."""
    policy = KV_POLICIES.read(spec.kv_policy or "full")
    assert isinstance(policy, KVPolicy), "the table holds nothing else"
    return policy.open(config)


class DeviceMemory(NamedTuple):
    """Free and total bytes of a device's memory."""

    device: str
    free: float
    total: float

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        """The memory of `device` now."""
        if device.type == "cuda":
            torch.cuda.empty_cache()
            return cls(str(device), *torch.cuda.mem_get_info(device))
        found = psutil.virtual_memory()
        return cls(str(device), found.available, found.total)

    @classmethod
    def of(cls, machine: Machine) -> DeviceMemory:
        """The memory of an idle machine; for this machine's CPU the memory that is free now."""
        free = machine.free_memory_bytes
        if not machine.device.startswith("cuda"):
            free = min(free, psutil.virtual_memory().available)
        return cls(machine.device, free, machine.memory_bytes)


def cache_pages(
    spec: EngineSpec,
    one: int,
    memory: DeviceMemory,
    max_model_len: int,
    *,
    weights: float = 0,
    work: float = 0,
) -> int:
    """Number of pages for an engine whose page takes `one` bytes (including a draft model's, which shares page numbers).

    `spec` is `sized`. Without a count or bytes: enough for `max_num_seqs` sequences of `max_model_len`, at most
    `gpu_memory_utilization` of the memory. `weights` bytes are still to be loaded, and a step needs `work` bytes more.
    Raises FitError when not even one page fits.
    """
    device, free = memory.device, max(0.0, memory.free - weights)
    if spec.num_pages is not None:
        # A CPU allocates memory lazily: without this check the process would be killed in the middle of a request.
        if (spec.num_pages + 1) * one > free:
            raise FitError(
                f"{spec.num_pages} pages of {human_bytes(one)} are {human_bytes((spec.num_pages + 1) * one)}, "
                f"{device} has {human_bytes(free)} free",
                fix=f"at most engine.num_pages={max(0, int(free // one) - 1)} fit now; leave it out to size the cache by "
                "the free memory",
            )
        return spec.num_pages
    if spec.kv_cache_memory_bytes is not None:
        given, source = float(spec.kv_cache_memory_bytes), "engine.kv_cache_memory_bytes"
    elif device.startswith("cuda"):
        unused = memory.total * (1 - (spec.gpu_memory_utilization or 0.9))
        given, source = free - unused - work, f"what gpu_memory_utilization leaves of the free memory of {device}"
    else:
        given, source = free * (spec.gpu_memory_utilization or 0.3), f"that part of the free memory of {device}"
    count = int(max(given, 0) // one) - 1  # the null page
    if count < 1:
        raise FitError(
            f"{source} is {human_bytes(max(given, 0))}, a KV cache of one page needs {human_bytes(2 * one)}",
            fix="raise engine.kv_cache_memory_bytes, free some memory, or use a smaller model",
        )
    if spec.kv_cache_memory_bytes is None:
        assert spec.max_num_seqs is not None, "sized() fills max_num_seqs in"
        count = min(count, spec.max_num_seqs * -(-max_model_len // spec.block_size))
    return count


def work_bytes(dims: ModelDims, spec: EngineSpec, dtype: str, device: str, *, widens: bool = False) -> float:
    """Peak bytes of one step of a `sized` engine beside weights and cache; `widens`: see `widened_bytes`."""
    assert spec.max_num_seqs is not None and spec.max_num_batched_tokens is not None, "sized() fills both in"
    tokens, seqs = spec.max_num_batched_tokens, spec.max_num_seqs
    widened = widened_bytes(dims, tokens, dtype) if widens else 0.0
    return serve_bytes(
        dims, max_tokens=tokens, max_num_seqs=seqs, dtype=dtype, device=device, widened_bytes=widened
    ).value


def widened_bytes(dims: ModelDims, tokens: int, dtype: str) -> float:
    """Bytes of experts' codes that a step of `tokens` widens at a time, on a GPU that does so: gates and ups, two thirds of a layer's experts,
    or as many of them as are widened together, at least one."""
    found = 0.0
    for routed in (
        one.routed for one in dims.layers if tokens * one.routed.share > WIDENED_FROM and one.routed.products
    ):
        every = BYTES[dtype] * routed.params * 2 / 3
        single = (
            every * routed.share / (routed.products / 2)
        )  # of as many products of either kind as a token visits experts
        found = max(found, min(every, max(WIDENED_BYTES, single)))
    return found


def widens_experts(model: nn.Module, device: torch.device) -> bool:
    """Whether `model` on `device` has experts of codes that steps of many tokens widen (`hone.ops.expert_swiglu`)."""
    codes = (one.at_once() is not None for one in model.modules() if isinstance(one, ExpertLinears))
    return device.type == "cuda" and any(codes) and locate(device).runs_gluon


def will_widen(stored: float, dims: ModelDims, dtype: str, machine: Machine) -> bool:
    """As `widens_experts`, of a model that takes `stored` bytes: if experts were dense, it would take more."""
    experts = sum(one.routed.params for one in dims.layers)
    codes = stored < BYTES[dtype] * (dims.num_params - experts / 4)
    return machine.device.startswith("cuda") and bool(experts) and codes and machine.gpus[0].capability == "9.0"


def check_weights(folder: str, needed: int, device: torch.device) -> None:
    """Raises FitError when the weights in `folder`, of `needed` bytes, are more than the free memory of `device`."""
    free = DeviceMemory.now(device).free
    if needed > free:
        raise FitError(
            f"the weights in {folder} take {human_bytes(needed)}, {device} has {human_bytes(free)} free",
            fix="compress the model (hone compress), use a smaller one, or another device",
        )


def step_threads(spec: EngineSpec, num_params: int, num_tokens: int, available: int) -> int:
    """CPU threads for a step of `num_tokens`: one where synchronization costs more than parallel work saves."""
    small = num_params <= _SMALL_PARAMS and 2 * num_params * num_tokens <= _SMALL_FLOPS
    return spec.num_threads or (1 if small else available)


@contextmanager
def threads_of(spec: EngineSpec, device: torch.device, num_params: int, num_tokens: int) -> Iterator[None]:
    """Sets the CPU threads of a step of `num_tokens`, and restores the process's number afterwards.

    Threads synchronize after every operation. In small steps that costs more than the parallel work saves, and a time
    slice per operation when another process uses the core.
    """
    before = torch.get_num_threads()
    wanted = step_threads(spec, num_params, num_tokens, before) if device.type == "cpu" else before
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
