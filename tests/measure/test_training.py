"""The rates of a training step: what lasting work keeps of them, which file lacks them, and what two files have together."""

from __future__ import annotations

import pytest
import torch

from hone.measure import training
from hone.measure.calibration import AttentionRate, Calibration, KernelRate
from hone.measure.timer import Probe, Timer


class Throttled:
    """Time that passes by work alone; arithmetic takes `slower` times as long after half a second of it."""

    def __init__(self, slower: float) -> None:
        self.now, self.slower = 0.0, slower

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float, *, computes: bool) -> Probe:
        def call() -> None:
            self.now += seconds * (self.slower if computes and self.now > 0.5 else 1.0)

        return Probe(call, 1e12, 0.1)


def test_what_lasts_is_the_rate_of_arithmetic_alone():
    clock = Throttled(1.25)
    probes = {
        ("forward", 4096, 4096, 4096): clock.work(0.02, computes=True),
        (training.TRAINED, 8192): clock.work(0.01, computes=True),
        (training.TRAINED, 512): clock.work(9.0, computes=True),  # a length of few pairs is not of such a step
        (training.KERNEL, "swiglu"): clock.work(0.03, computes=False),
        (training.FP8, "rowwise", False, "trained", 16384, 4096, 4096): clock.work(0.01, computes=True),
        (training.FP8, "rowwise", True, "trained", 16384, 4096, 4096): clock.work(9.0, computes=True),
    }
    alone = {name: 0.03 if name[0] == training.KERNEL else 0.02 if name[0] == "forward" else 0.01 for name in probes}
    found = training.sustained(Timer("cpu", clock), "bfloat16", probes, alone)
    assert found == {"bfloat16": pytest.approx(1 / 1.25), "float8": pytest.approx(1 / 1.25)}
    quick = Throttled(1.0)
    even = {("forward", 4096, 4096, 4096): quick.work(0.02, computes=True)}
    assert training.sustained(Timer("cpu", quick), "float32", even, {next(iter(even)): 0.02}) == {
        "float32": pytest.approx(1.0)
    }
    assert training.sustained(Timer("cpu", quick), "float32", {}, {}) == {}


def test_attention_is_timed_at_each_length(monkeypatch):
    for name, value in {"GPU_LENGTHS": (8, 32), "GPU_TOKENS": 32, "GPU_HEADS": 4, "GPU_HEAD_DIM": 16}.items():
        monkeypatch.setattr(training, name, value)
    seen = []

    def attend(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return torch.nn.functional.scaled_dot_product_attention(
            *(one.transpose(1, 2) for one in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    probes = training.gpu_attention("cpu", "bfloat16", attend, num_kv_heads=2)
    for probe in probes.values():
        with torch.set_grad_enabled(probe.wants_grad):
            probe.work()
    assert [(tuple(q), tuple(k)) for q, k, _ in seen[::2]] == [
        ((4, 8, 4, 16), (4, 8, 2, 16)),
        ((1, 32, 4, 16), (1, 32, 2, 16)),
    ]
    assert probes[training.ATTENTION, 8].amount == 4 * 4 * 16 * 4 * 8 * 9 / 2
    assert {name[1] for name in training.gpu_attention("cpu", "float32")} == {8, 32}


def calibration(dtype: str, **more) -> Calibration:
    rate = KernelRate(kernel="adamw", dtype=dtype, bytes_per_s=3e12)
    lengths = (
        AttentionRate(dtype=dtype, seq_len=one, forward_flops_per_s=1, train_flops_per_s=1) for one in (512, 8192)
    )
    given = {
        "device": "x", "threads": 1, "torch": "2", "read_bytes_per_s": 1, "copies": (), "matmuls": (), "op_s": 1, "exp_per_s": 1,
        "attentions": tuple(lengths), "kernels": (rate,), "sustained": {dtype: 0.9}, **more,
    }  # fmt: skip
    return Calibration(**given)


def test_two_dtypes_have_their_kernels_together():
    half, single = calibration("bfloat16", beside=0.2), calibration("float32")
    both = single.joined(half)
    assert both.with_kernels == {"bfloat16", "float32"} and both.sustained == {"bfloat16": 0.9, "float32": 0.9}
    assert both.beside == 0.2 and both.kernel_bytes_per_s("adamw", "bfloat16") == 3e12
    assert both.kernel_bytes_per_s("widen", "bfloat16") is None
    table = dict(both.table())
    assert table["bfloat16 arithmetic that lasts"] == "90.0% of these rates"
    assert table["products beside transfers"] == "20% of the transfers' seconds longer"
    assert "float32 attention over 8,192 tokens" in table
    assert Calibration.model_validate_json(both.model_dump_json()) == both
