"""Decoding on a GPU reads weights and pages once and launches nothing; on a CPU it is what it was."""

from __future__ import annotations

import random

import pytest

from benchmarks.serve import SHAPES
from hone.cost.dims import ModelDims
from hone.cost.serve.decode import decode_step_seconds, decode_step_starts
from hone.measure.calibration import Bandwidth, Calibration, MatmulRate
from hone.measure.machine import Machine
from hone.model.shape import Shape
from tests.cost.h200 import GPU, LLAMA_8B, h200, row

CAPTURED = {"dtype": "bfloat16", "in_place": True, "captured": True}


@pytest.mark.parametrize("num_seqs", [1, 16, 64])
def test_a_replayed_step_takes_what_the_ledger_measured(num_seqs):
    """benchmarks/serve.py: prompts of 512 and up to 64 + 4 tokens more; the engine's Python is in the measured step."""
    measured_s = 1e-3 * row("serve", f"llama3-8b: decode, batch {num_seqs}")["ms"]
    predicted = decode_step_seconds(LLAMA_8B, h200(), num_seqs=num_seqs, context=548, **CAPTURED)
    assert 0.75 * measured_s < predicted.value < measured_s
    assert not predicted.bound and "starts" not in predicted.formula


def test_weights_and_pages_are_read_once():
    machine = h200()
    read = machine.calibration.read_bytes_per_s
    short, long = (
        decode_step_seconds(LLAMA_8B, machine, num_seqs=64, context=context, **CAPTURED).value
        for context in (1000, 2000)
    )
    pages = 64 * 1000 * 2 * LLAMA_8B.kv_values_per_token
    assert 0.77 < pages / (long - short) / read < 1.0  # as `paged decode` in ops.jsonl
    gathered = [
        decode_step_seconds(LLAMA_8B, machine, num_seqs=64, context=context, dtype="bfloat16").value
        for context in (20_000, 40_000)
    ]
    assert gathered[1] - gathered[0] > 2.5 * 20 * pages / read
    none = decode_step_seconds(LLAMA_8B, machine, num_seqs=1, context=0, **CAPTURED).value
    assert none > 2 * LLAMA_8B.matmul_params / read


def test_many_rows_run_the_library_product():
    machine = h200()
    times = [
        decode_step_seconds(LLAMA_8B, machine, num_seqs=num_seqs, context=0, **CAPTURED).value
        for num_seqs in (64, 65, 256, 1024)
    ]
    assert times == sorted(times) and times[1] < 1.2 * times[0]
    assert times[3] > 2 * 1024 * LLAMA_8B.matmul_params / machine.calibration.peak_flops_per_s("bfloat16")


def test_quantized_weights_are_fewer_bytes_read_less_well():
    machine, dense = h200(), 2 * LLAMA_8B.matmul_params
    plain = decode_step_seconds(LLAMA_8B, machine, num_seqs=1, context=0, **CAPTURED).value
    quarter = decode_step_seconds(LLAMA_8B, machine, num_seqs=1, context=0, weights_bytes=dense / 4, **CAPTURED).value
    assert plain / 4 < quarter < plain / 1.5


def test_a_step_that_is_not_captured_waits_for_its_launches():
    machine = h200()
    launched = decode_step_seconds(LLAMA_8B, machine, num_seqs=1, context=0, dtype="bfloat16", in_place=True).value
    assert launched == pytest.approx(decode_step_starts(LLAMA_8B) * machine.calibration.op_s)


def test_a_step_reads_the_experts_that_its_sequences_visit():
    """Counted by drawing: independent choices of 3 of 24 experts."""
    experts = {"kind": "moe", "num_experts": 24, "intermediate_size": 48, "router": {"kind": "softmax", "top_k": 3}}
    shape = Shape(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, feed_forward=("swiglu", experts))
    config = shape.config(vocab_size=300)
    dims, draw = config.dims(), random.Random(0)
    one = 3 * 64 * 48
    assert dims.layers[0].routed.params == 0 and dims.layers[1].routed.params == 24 * one
    assert dims.read_params(1) == dims.matmul_params
    for sequences in (1, 4, 20):
        seen = [len({e for _ in range(sequences) for e in draw.sample(range(24), 3)}) for _ in range(2000)]
        more = dims.read_params(sequences) - dims.matmul_params
        assert more == pytest.approx(2 * one * (sum(seen) / len(seen) - 3), rel=0.02, abs=1e-6)
    machine = h200()
    moe = SHAPES["qwen3-30b-a3b"][0].config(SHAPES["qwen3-30b-a3b"][1]).dims()
    rate = machine.calibration.read_bytes_per_s
    for sequences, experts_read in ((1, 8), (8, 51.6), (64, 125.9)):
        least = 2 * (moe.matmul_params + 48 * (experts_read - 8) * 3 * 2048 * 768) / rate
        step = decode_step_seconds(moe, machine, num_seqs=sequences, context=0, **CAPTURED).value
        quarter = decode_step_seconds(
            moe, machine, num_seqs=sequences, context=0, weights_bytes=2 * moe.read_params(10**6) / 4, **CAPTURED
        ).value
        assert least < step < 1.1 * least + 1e-3
        assert least / 4 < quarter < least / 1.5 + 1e-3


def test_without_a_calibration_it_is_the_data_sheets_bound():
    bare = h200().model_copy(update={"calibration": None})
    bound = decode_step_seconds(LLAMA_8B, bare, num_seqs=1, context=0, **CAPTURED)
    assert bound.bound and bound.value == pytest.approx(2 * LLAMA_8B.matmul_params / 4.8e12, rel=0.01)
    assert "H200" in GPU.name


def test_a_cpu_gathers_pages_and_starts_every_operation():
    """All rates alike, so that the parts can be written down."""
    dims = ModelDims.uniform(
        num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, head_dim=32,
        vocab_size=100, max_seq_len=64,
    )  # fmt: skip
    calibration = Calibration(
        device="test", threads=1, torch="2", read_bytes_per_s=1e9, op_s=1e-6, exp_per_s=1e9, attentions=(),
        copies=(Bandwidth(num_bytes=1 << 20, bytes_per_s=1e9),),
        matmuls=(MatmulRate(dtype="float32", m=1, n=1, k=1, flops_per_s=1e15),),
    )  # fmt: skip
    cpu = Machine(
        cpu="c", num_cores=1, num_threads=1, ram_bytes=1, os="x", python="3", torch="2", calibration=calibration
    )
    weights = sum(n * k + 3 * n + 3 * k for layer in dims.layers for n, k in layer.matmuls) + 100 * 64 + 300 + 192
    pages = 3 * 3 * 10 * 2 * (2 * 64)  # gathered (read, written) and read; sequences, context, layers, keys and values
    moved = 3 * 2 * (16 * 64 + 6 * 128 + 6 * 128)
    starts = 9 + 2 * 60 + 60
    gates = 3 * 2 * 128  # an exponential each
    expected = (4 * (weights + pages + moved) + gates) / 1e9 + starts * 1e-6
    assert decode_step_seconds(dims, cpu, num_seqs=3, context=10).value == pytest.approx(expected, rel=1e-9)
