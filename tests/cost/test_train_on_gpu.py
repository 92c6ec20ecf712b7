"""A training step on a GPU: the prediction from the ledger's own rates against the steps that the ledger measured."""

from __future__ import annotations

import pytest

from hone.cost.roofline import matmul_rate, matmul_seconds
from hone.cost.steps import train_step_seconds
from tests.cost.h200 import LLAMA_8B, h200, row


@pytest.mark.parametrize(
    ("rows", "seq_len", "every", "how"),
    [(1, 8192, 2, ", compiled"), (4, 8192, 1, ", compiled"), (1, 8192, 1, ""), (1, 4096, 1, "")],
)
def test_a_training_step_takes_what_the_ledger_measured(rows, seq_len, every, how):
    name = f"training, llama3-8b shape, bf16, {rows} x {seq_len}, recompute every {every}{how}"
    measured_s = rows * seq_len / row("train", name)["value"]
    predicted = train_step_seconds(
        LLAMA_8B, h200(), batch_tokens=rows * seq_len, seq_len=seq_len, dtype="bfloat16", recomputed=range(0, 32, every)
    )
    assert predicted.value == pytest.approx(measured_s, rel=0.15)


def test_between_two_shapes_a_gpu_keeps_to_its_roofline_and_a_cpu_to_its_rates():
    machine = h200()
    peak, read = machine.calibration.peak_flops_per_s("bfloat16"), machine.calibration.read_bytes_per_s
    for rows in (32, 64, 128, 512):
        num_bytes = 2 * (rows * 4096 * 2 + 4096 * 4096)
        roof_s = max(2 * rows * 4096**2 / peak, num_bytes / read)
        found = matmul_seconds(machine, (rows, 4096, 4096), "forward", num_bytes, "bfloat16")
        assert roof_s * 0.999 < found < 1.15 * roof_s
        cpu = machine.model_copy(update={"device": "cpu"})
        rate = matmul_rate(machine.calibration, "bfloat16", (rows, 4096, 4096))
        assert matmul_seconds(cpu, (rows, 4096, 4096), "forward", 1.0, "bfloat16") == 2 * rows * 4096**2 / rate


def test_fp8_halves_the_products_of_the_layers_alone_and_says_what_is_assumed():
    machine, layouts = h200(), ("forward", "input_gradient", "weight_gradient")
    how = {"batch_tokens": 8192, "seq_len": 8192, "dtype": "bfloat16"}
    plain = train_step_seconds(LLAMA_8B, machine, **how)
    times = {count: train_step_seconds(LLAMA_8B, machine, **how, fp8=layouts[:count]) for count in range(4)}
    assert times[0] == plain
    assert times[3].value < times[2].value < plain.value
    # The head's three products stay, as attention, update and traffic do; the casts take a part of what is won.
    assert "387 matmuls" in plain.formula and "casts" not in plain.formula
    assert "3 matmuls" in times[3].formula and "384 fp8 products (assumed 1.78 times as fast as" in times[3].formula
    products_s = 3 * 2 * 8192 * sum(one.matmul_params for one in LLAMA_8B.layers) / 660e12
    assert 0.25 * products_s < plain.value - times[3].value < 0.44 * products_s
    calibration = machine.calibration
    rates = [
        one.model_copy(update={"dtype": "float8", "flops_per_s": 1.6 * one.flops_per_s}) for one in calibration.matmuls
    ]
    known = machine.model_copy(
        update={"calibration": calibration.model_copy(update={"matmuls": (*calibration.matmuls, *rates)})}
    )
    measured = train_step_seconds(LLAMA_8B, known, **how, fp8=layouts)
    assert "fp8 products (calibrated)" in measured.formula and times[3].value < measured.value < plain.value
