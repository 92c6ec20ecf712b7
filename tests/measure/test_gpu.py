"""On a GPU a window sees what torch allocates there, and NVML's joules."""

from __future__ import annotations

import pytest

from hone.measure.machine import describe
from hone.measure.window import Window

pytestmark = pytest.mark.gpu


def test_window_on_a_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    machine = describe("cuda")
    assert machine.gpus and machine.processor == torch.cuda.get_device_name(0)
    with Window("cuda") as outer:
        held = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
        del held
        with Window("cuda") as inner:
            torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    assert outer.memory_growth_bytes == 256 << 20 and inner.memory_growth_bytes == 64 << 20
    assert outer.energy_j is None or outer.energy_j >= 0
