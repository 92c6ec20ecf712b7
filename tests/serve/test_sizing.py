"""How many pages the cache gets, from a count, from bytes, from free memory."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import FitError, SpecError
from hone.cost.dims import ModelDims
from hone.measure.machine import Gpu, Machine, describe
from hone.model.shape import Shape
from hone.serve import sizing
from hone.serve.engine import Engine
from hone.serve.http import ServerSpec
from hone.serve.sizing import DeviceMemory, cache_pages, sized
from hone.serve.spec import EngineSpec
from tests.serve.small import decoder, engine

CPU = DeviceMemory.now(torch.device("cpu"))


def test_num_pages_is_taken_as_given():
    assert cache_pages(EngineSpec(num_pages=7, kv_cache_memory_bytes=1), 1000, CPU, 512) == 7


def test_kv_cache_memory_bytes_include_the_null_page():
    assert cache_pages(EngineSpec(kv_cache_memory_bytes=10_500), 1000, CPU, 512) == 9
    one = engine(decoder(), num_pages=None, kv_cache_memory_bytes=100_000)
    assert one.cache_bytes <= 100_000 < one.cache_bytes * (one.pool.num_pages + 2) / (one.pool.num_pages + 1)


def test_free_memory_is_used_up_to_what_max_num_seqs_can_fill():
    few = EngineSpec(max_num_seqs=2, block_size=16)
    assert cache_pages(few, 1000, CPU, 100) == 2 * 7
    free = int(CPU.free)  # what the calls are given: what is free by now is another number
    part = EngineSpec(max_num_seqs=1024, block_size=16, gpu_memory_utilization=0.01)
    pages = cache_pages(part, 10_000, CPU, 10**6)
    assert pages * 10_000 == pytest.approx(0.01 * free, rel=0.01)
    assert cache_pages(part, 10_000, CPU, 10**6, weights=free // 2) == pytest.approx(pages / 2, rel=0.01)


def test_formats_and_draft_model_belong_to_the_engine():
    for name in ("draft", "dtype"):
        with pytest.raises(SpecError) as caught:
            ServerSpec.from_overrides({name: "x"})
        assert f"'engine.{name}'" in caught.value.fix


def machine(device: str = "cpu", cores: int = 2, gpu_bytes: int = 0) -> Machine:
    gpus = (Gpu(name="one", memory_bytes=gpu_bytes, capability="9.0", num_multiprocessors=132),) if gpu_bytes else ()
    return Machine(
        cpu="one",
        num_cores=cores,
        num_threads=cores,
        ram_bytes=8 << 30,
        gpus=gpus,
        os="",
        python="",
        torch=None,
        device=device,
    )


def test_sizes_come_from_the_device_unless_they_are_given():
    def sizes(where, **given):
        spec = sized(EngineSpec(**given), where)
        assert spec.block_size == (64 if where.device.startswith("cuda") else 16)
        return spec.max_num_seqs, spec.max_num_batched_tokens

    assert sizes(machine("cuda", gpu_bytes=141 << 30)) == (512, 8192)
    assert sizes(machine("cuda:0", gpu_bytes=24 << 30)) == (256, 8192)
    assert sizes(machine(cores=2)) == (64, 1024)
    assert sizes(machine(cores=1)) == (32, 512)
    assert sizes(machine(cores=200)) == (512, 8192)
    assert sizes(machine(), max_num_batched_tokens=8) == (8, 8)
    assert sizes(machine(), max_num_seqs=2000) == (2000, 2000)
    assert sizes(machine("cuda", gpu_bytes=141 << 30), max_num_seqs=9, max_num_batched_tokens=100) == (9, 100)
    with pytest.raises(SpecError, match="never be scheduled"):
        EngineSpec.read({"max_num_seqs": 9, "max_num_batched_tokens": 8})


def test_a_gpus_cache_is_what_weights_and_work_leave_of_its_part():
    gpu, many = DeviceMemory("cuda", 60_000_000, 100_000_000), EngineSpec(max_num_seqs=10**6, block_size=16)
    assert cache_pages(many, 1000, gpu, 512, work=5_000_000) == 44_999  # 60 free, 10 stay unused, 5 for a step
    half = EngineSpec(max_num_seqs=10**6, block_size=16, gpu_memory_utilization=0.5)
    assert cache_pages(half, 1000, gpu, 512) == 9_999
    with pytest.raises(FitError, match="gpu_memory_utilization"):
        cache_pages(half, 1000, gpu, 512, weights=20_000_000)


def test_the_engine_says_its_sizes():
    one = engine(decoder(), max_num_seqs=None, max_num_batched_tokens=None)
    spec = sized(EngineSpec(), describe("cpu"))
    assert f"max_num_seqs={spec.max_num_seqs} max_num_batched_tokens={spec.max_num_batched_tokens}" in one.sizes
    assert "64 pages of 4 tokens" in one.sizes and "in float32" in one.sizes


def test_too_little_memory_says_what_is_needed():
    with pytest.raises(FitError, match=r"engine.kv_cache_memory_bytes is 900 B, a KV cache of one page needs 2\.0 KiB"):
        cache_pages(EngineSpec(kv_cache_memory_bytes=900), 1000, CPU, 512)
    with pytest.raises(FitError, match="free memory"):
        cache_pages(EngineSpec(), 10**15, CPU, 512)


def test_weights_that_do_not_fit_are_a_clear_mistake(tiny_llama, monkeypatch):
    monkeypatch.setattr(sizing.DeviceMemory, "now", lambda device: DeviceMemory("cpu", 1000, 1000))
    with pytest.raises(FitError, match="cpu has 1000 B free"):
        Engine(tiny_llama)


def test_more_pages_than_memory_fail_at_once():
    with pytest.raises(FitError, match=r"100000000 pages of 1.0 MiB are .* cpu has .* free") as caught:
        cache_pages(EngineSpec(num_pages=100_000_000), 1 << 20, CPU, 512)
    assert "engine.num_pages=" in caught.value.fix


def test_steps_that_widen_experts_have_room_for_it():
    """Gates and ups of all experts where they are few, 256 MiB where they are more, one of them if it is larger, nothing up to 80 visits an expert or elsewhere."""
    sizes = {
        "hidden_size": 2880,
        "num_layers": 2,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "max_seq_len": 8192,
    }

    def dims(width: int) -> ModelDims:
        moe = {"kind": "moe", "num_experts": 32, "intermediate_size": width, "router": {"kind": "softmax", "top_k": 4}}
        return Shape(**sizes, intermediate_size=width, feed_forward=("swiglu", moe)).config(1000).dims()

    wide, narrow = dims(2880), dims(64)
    assert [sizing.widened_bytes(wide, tokens, "bfloat16") for tokens in (1, 640, 641)] == [0, 0, 256 << 20]
    assert sizing.widened_bytes(narrow, 8192, "bfloat16") == pytest.approx(2 * 32 * 2 * 64 * 2880)
    assert sizing.widened_bytes(dims(30_000), 8192, "bfloat16") == pytest.approx(2 * 2 * 30_000 * 2880)  # of one expert
    hopper, spec = machine("cuda", gpu_bytes=80 << 30), EngineSpec(max_num_seqs=8, max_num_batched_tokens=8192)
    plain, more = (sizing.work_bytes(wide, spec, "bfloat16", "cuda", widens=one) for one in (False, True))
    assert more - plain == 256 << 20
    codes, dense = 2 * wide.num_params - wide.layers[1].routed.params, 2 * wide.num_params
    older = hopper.model_copy(update={"gpus": (hopper.gpus[0].model_copy(update={"capability": "8.0"}),)})
    assert sizing.will_widen(codes, wide, "bfloat16", hopper) and not sizing.will_widen(dense, wide, "bfloat16", hopper)
    assert not any(sizing.will_widen(codes, wide, "bfloat16", one) for one in (older, machine()))
    assert not sizing.widens_experts(decoder(), torch.device("cuda"))
