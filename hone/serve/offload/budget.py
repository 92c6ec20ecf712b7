"""How an engine divides `engine.gpu_memory` among weights, one step's work and the KV cache, and which layers stream."""

from __future__ import annotations

from dataclasses import dataclass

from hone.base.errors import FitError, SpecError
from hone.base.figure import byte_count, human_bytes
from hone.cost.memory import BYTES
from hone.cost.serve.offload import NUM_BUFFERS, Offload, fewest_streamed
from hone.measure.machine import Machine
from hone.model.config import ModelConfig
from hone.model.facts import CheckpointFacts
from hone.serve.sizing import DeviceMemory, work_bytes
from hone.serve.spec import EngineSpec

DEVICES = ["cuda"]
"""Kinds of devices that stream weights; tests add the CPU."""

_CACHE_SHARE = 0.25
"""Of the memory beside work and ends, the part that an unsized cache gets at least where layers stream: the copies of a step
take as long for one sequence as for hundreds."""

_GAPS = 64 << 10
"""Bytes between the tensors in the buffers, at most."""

_IN_MEMORY = 1.04
"""Bytes of quantized layers on the device, of those in the folder: scales of blocks are expanded to rows (3 % of fp8 codes)."""


@dataclass(frozen=True)
class MemoryBudget:
    """The parts of a GPU's memory that an engine may take, in bytes."""

    total: int
    """`engine.gpu_memory`."""
    work: float
    """Activations and logits of one step."""
    ends: float
    """Embedding, last norm and head."""
    offload: Offload
    page: int
    """One page of the KV cache."""
    least_pages: int
    """Those of one longest sequence."""
    most_pages: int
    """Those that `max_num_seqs` longest sequences fill."""
    asked: int | None
    """Bytes of the cache that the spec gives."""

    @property
    def least_cache(self) -> int:
        """Bytes that the cache must have: those that are asked for, else one longest sequence and the null page."""
        return self.asked if self.asked is not None else (self.least_pages + 1) * self.page

    def cache_bytes(self, weights: float) -> int:
        """Bytes of the cache beside `weights` bytes on the device. Raises FitError where they are too many."""
        rest = int(self.total - self.work - weights)
        if rest < self.least_cache:
            raise FitError(
                f"engine.gpu_memory is {human_bytes(self.total)}: weights take {human_bytes(weights)}, one step "
                f"{human_bytes(self.work)}, and the KV cache needs {human_bytes(self.least_cache)}",
                fix=f"set engine.gpu_memory={_rounded(self.work + weights + self.least_cache)}, or lower engine.max_model_len",
            )
        return self.asked if self.asked is not None else min(rest, (self.most_pages + 1) * self.page)

    def sized(self, spec: EngineSpec, weights: float) -> EngineSpec:
        """`spec` with the bytes of its cache beside `weights` bytes on the device. Raises FitError as `cache_bytes`."""
        given = self.cache_bytes(weights)
        return spec if spec.num_pages is not None else spec.model_copy(update={"kv_cache_memory_bytes": given})


def budget_of(
    spec: EngineSpec, model: CheckpointFacts, machine: Machine, *, page: int, longest_pages: int, memory: DeviceMemory
) -> MemoryBudget | None:
    """The parts of `engine.gpu_memory`; None without it. `page`: bytes of a page; `longest_pages`: those of a longest sequence.

    `spec` is sized. Raises SpecError for a device that streams nothing and for an amount that is too small (with the smallest one that
    is not), FitError for more than the device has free.
    """
    if spec.gpu_memory is None:
        return None
    device = machine.device
    if device.partition(":")[0] not in DEVICES:
        raise SpecError(
            f"engine.gpu_memory is {spec.gpu_memory} and the device is {device}, which has no memory of its own",
            fix="leave it out, or give --device=cuda",
        )
    total = byte_count(spec.gpu_memory, memory.total)
    if total > memory.free:
        raise FitError(
            f"engine.gpu_memory is {human_bytes(total)}, {device} has {human_bytes(memory.free)} free",
            fix="lower it, or end other processes on this device",
        )
    dtype = model.dtype if spec.dtype == "auto" else spec.dtype
    asked = None if spec.num_pages is None else (spec.num_pages + 1) * page
    if asked is None:
        asked = spec.kv_cache_memory_bytes
    ends, layers = layer_sizes(model, dtype)
    assert spec.max_num_seqs is not None, "sized() fills it in"
    work = work_bytes(model.config.dims(), spec, dtype, device)
    room = total - work - ends - _GAPS
    least = asked if asked is not None else (longest_pages + 1) * page
    most = max(least, (spec.max_num_seqs * longest_pages + 1) * page)
    caches = [least] if asked is not None else [min(most, max(least, room * _CACHE_SHARE)), least]
    found = next(filter(None, (fewest_streamed(layers, room - cache) for cache in caches)), None)
    if found is None:
        every = fewest_streamed(layers, float("inf"))
        streams = len(layers) > NUM_BUFFERS
        held = NUM_BUFFERS * max(layers) if streams else every.device_bytes if every else 0.0
        raise SpecError(
            f"engine.gpu_memory is {human_bytes(total)}: embedding and head take {human_bytes(ends)}, one step {human_bytes(work)}, "
            f"{f'{NUM_BUFFERS} buffers of a layer' if streams else 'the layers'} {human_bytes(held)} and the KV cache "
            f"{human_bytes(least)}{'' if asked is not None else ' (one sequence of max_model_len)'}",
            fix=f"set engine.gpu_memory={_rounded(work + ends + _GAPS + held + least)} or more, or lower engine.max_num_batched_tokens or "
            "engine.max_model_len",
        )
    return MemoryBudget(total, work, ends, found, page, longest_pages, spec.max_num_seqs * longest_pages, asked)


def layer_sizes(model: CheckpointFacts, dtype: str) -> tuple[float, list[float]]:
    """Bytes of embedding, last norm and head together, and of each layer: weights in `dtype`, quantized layers as stored."""
    config, width = model.config, BYTES[dtype]
    params = [
        sum(part.num_params for part in (*config.linears(index).values(), *config.parameters(index).values()))
        for index in range(config.num_layers)
    ]
    ends = float(width * (config.num_params - sum(params)))
    if not model.packed:
        return ends, [float(width * one) for one in params]
    stored = _IN_MEMORY * max(model.weights_bytes - ends, 0.0)
    return ends, [stored * one / max(sum(params), 1) for one in params]


def check_cached(config: ModelConfig, num_cached: int) -> None:
    """Raises SpecError where `num_cached` experts of a layer cannot be on the device and the others in host memory."""
    fed = {index: one.feed_forward for index, one in enumerate(config.layers) if one.feed_forward.sums_once}
    if not fed:
        raise SpecError("the model has no experts to keep in host memory", fix="leave engine.expert_offload out")
    for index, one in fed.items():
        if not one.router.by_token or num_cached > one.num_experts:
            raise SpecError(
                f"expert_offload.num_cached_experts is {num_cached}, layer {index} has {one.num_experts} experts (router '{one.router.kind}')",
                fix=f"set it to at most {one.num_experts}, with a router whose tokens choose, or leave expert_offload out",
            )


def expert_bytes(model: CheckpointFacts, dtype: str) -> float:
    """Bytes of the experts of all layers, but for shared ones: in `dtype`, quantized ones as stored."""
    config = model.config
    experts = [one for index in range(config.num_layers) for one in config.linears(index).values() if one.experts]
    params = sum(one.num_params for one in experts)
    if not model.packed:
        return float(BYTES[dtype] * params)
    ends, layers = layer_sizes(model, dtype)
    inner = config.num_params - ends / BYTES[dtype]
    return sum(layers) * params / max(inner, 1.0)


def _rounded(num_bytes: float) -> str:
    """`num_bytes` rounded up, as the field takes it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 10 * size or unit == "KiB":
            tenths = int(-(-10 * num_bytes // size))
            return f"{tenths // 10}.{tenths % 10}{unit}"
    raise AssertionError("the last unit fits all")
