"""Rates are looked up, interpolated and labelled as the docstrings say."""

from __future__ import annotations

import pytest

from hone.cost.dims import ModelDims
from hone.cost.roofline import (
    copy_rate,
    data_sheets,
    linear_seconds,
    matmul_rate,
    matmul_seconds,
    seconds,
    speed_of_light,
)
from hone.cost.serve.decode import decode_step_seconds
from hone.cost.steps import forward_seconds, train_step_seconds
from hone.measure.calibration import AttentionRate, Bandwidth, Calibration, LinearRate, MatmulRate
from hone.measure.machine import Gpu, Machine
from tests.cost.h200 import h200


def calibration(op_s: float = 1e-6) -> Calibration:
    shapes = [(1, 256, 256), (16, 256, 256), (256, 256, 256), (256, 1024, 256), (2048, 1024, 1024)]
    return Calibration(
        device="test", threads=1, torch="2", read_bytes_per_s=10e9, op_s=op_s, exp_per_s=1e9,
        attentions=(AttentionRate(dtype="float32", forward_flops_per_s=5e10, train_flops_per_s=1.5e10),),
        copies=(Bandwidth(num_bytes=1 << 16, bytes_per_s=100e9), Bandwidth(num_bytes=1 << 28, bytes_per_s=10e9)),
        matmuls=tuple(
            MatmulRate(dtype="float32", m=m, n=n, k=k, flops_per_s=m * 1e9) for m, n, k in shapes
        ),
    )  # fmt: skip


def machine(**more) -> Machine:
    return Machine(cpu="cpu", num_cores=2, num_threads=2, ram_bytes=1, os="x", python="3", torch="2", **more)


def test_an_exact_shape_has_its_measured_rate():
    assert matmul_rate(calibration(), "float32", (16, 256, 256)) == 16e9
    assert matmul_rate(calibration(), "float32", None) == 2048e9
    assert copy_rate(calibration(), 1 << 28) == 10e9


def test_between_two_shapes_lies_a_rate_between():
    assert 16e9 < matmul_rate(calibration(), "float32", (64, 256, 256)) < 256e9
    assert 10e9 < copy_rate(calibration(), 1 << 22) < 100e9


def test_the_larger_of_both_roofs_and_the_starts():
    here = machine(calibration=calibration())
    bound_by_flops = seconds(here, matmul=(256, 256, 256), num_bytes=8)
    assert bound_by_flops.value == pytest.approx(2 * 256**3 / 256e9)
    bound_by_bytes = seconds(here, flops=1.0, num_bytes=1 << 28)
    assert bound_by_bytes.value == pytest.approx((1 << 28) / 10e9)
    assert seconds(here, num_ops=1000).value == pytest.approx(1e-3)
    assert not bound_by_flops.bound and "calibrated" in bound_by_flops.formula


def test_without_calibration_it_is_a_bound_and_says_so():
    bare = seconds(machine(), flops=1e12, num_bytes=1)
    assert bare.bound and bare.value == pytest.approx(1e12 / (2 * 256e9)) and "not calibrated" in bare.formula
    other = seconds(machine(calibration=calibration()), flops=1e12, dtype="bfloat16")
    assert other.bound and "bfloat16" in other.formula


def test_gpus_come_from_their_data_sheets():
    gpu = Gpu(name="NVIDIA H200", memory_bytes=1, capability="9.0", num_multiprocessors=132)
    peak, bandwidth, source = speed_of_light(machine(device="cuda", gpus=(gpu,)), "bfloat16")
    assert (peak, bandwidth) == (989.4e12, 4.8e12) and "H200" in source
    strange = Gpu(name="NVIDIA X1", memory_bytes=1, capability="9.0", num_multiprocessors=1)
    _, _, source = speed_of_light(machine(device="cuda:0", gpus=(strange,)), "bfloat16")
    assert "X1 is not listed" in source
    narrow = Gpu(name="NVIDIA L40S", memory_bytes=1, capability="8.9", num_multiprocessors=142)
    _, _, source = speed_of_light(machine(device="cuda", gpus=(narrow,)), "float64")
    assert "L40S is listed without a rate for float64" in source
    a100 = Gpu(name="NVIDIA A100-SXM4-80GB", memory_bytes=1, capability="8.0", num_multiprocessors=108)
    peak, _, source = speed_of_light(machine(device="cuda", gpus=(a100,)), "float8")
    assert peak == 312e12 and "it has no float8: the rate of bfloat16" in source
    assert {"H200", "H100", "A100", "B200"} <= {row["match"] for row in data_sheets()}


def test_steps_grow_with_their_work():
    dims = ModelDims.uniform(
        num_layers=4, hidden_size=192, intermediate_size=512, num_heads=6, num_kv_heads=6, head_dim=32,
        vocab_size=4096, max_seq_len=512, tie_embeddings=True,
    )  # fmt: skip
    here = machine(calibration=calibration())
    forward = forward_seconds(dims, here, tokens=2048, seq_len=256).value
    train = train_step_seconds(dims, here, batch_tokens=2048, seq_len=256).value
    assert 2.5 * forward < train < 5 * forward
    again = train_step_seconds(dims, here, batch_tokens=2048, seq_len=256, recomputed=range(4)).value
    assert train < again < 1.5 * train
    assert train_step_seconds(dims, here, batch_tokens=1024, seq_len=256, micro_batches=2).value > 0.9 * train
    one = decode_step_seconds(dims, here, num_seqs=1, context=100).value
    assert one < decode_step_seconds(dims, here, num_seqs=64, context=100).value
    assert decode_step_seconds(dims, machine(), num_seqs=1, context=100).bound


def test_an_fp8_linear_that_waited_for_its_launches_is_no_slower_than_the_bf16_product():
    """Timed alone on a slow host, small ones take the time of their launches, which steps count apart."""
    machine = h200()
    shape, fast = (8192, 4096, 4096), 1e15
    point = {"recipe": "rowwise", "held": True, "passes": "forward", "m": 8192, "n": 4096, "k": 4096}

    def took(rate: float, device: str = "cuda:0") -> float:
        changed = machine.calibration.model_copy(
            update={"fp8": (LinearRate(**point, flops_per_s=rate),), "sustained": {}}
        )
        at = machine.model_copy(update={"calibration": changed, "device": device})
        return linear_seconds(at, shape, "rowwise", held=True, trained=False)

    numbers = 8192 * 4096 * 2 + 4096 * 4096
    product = matmul_seconds(machine, shape, "forward", 2 * numbers, "bfloat16")
    cast = 6 * 8192 * 4096 / machine.calibration.read_bytes_per_s
    assert took(1e13) == pytest.approx(product + cast, rel=0.05)
    assert took(fast) == pytest.approx(2 * 8192 * 4096**2 / fast)
    assert took(1e13, "cpu") == pytest.approx(2 * 8192 * 4096**2 / 1e13)
