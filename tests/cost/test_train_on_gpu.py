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
