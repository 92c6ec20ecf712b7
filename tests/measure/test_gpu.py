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


def test_calibrated_gpu_rates_are_below_the_data_sheet(tmp_path, monkeypatch):
    """Rates of kernels, not of launching and waiting for them: within a data sheet, and no less than a third of it."""
    import torch

    from hone.cost.roofline import speed_of_light
    from hone.measure import calibrate as micro

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(micro, "disturbance", lambda *_: "")
    describe.cache_clear()
    from hone.ops.probes import training_probes

    found = micro.calibrate("cuda", fresh=True, kernels=training_probes)
    print("\n".join("  ".join(row) for row in found.table()))
    peak, read, source = speed_of_light(describe("cuda"), "bfloat16")
    describe.cache_clear()
    if "not listed" in source:
        pytest.skip(source)
    assert peak / 3 < found.peak_flops_per_s("bfloat16") < peak
    assert read / 3 < found.read_bytes_per_s < read
    large = max(found.copies, key=lambda copy: copy.num_bytes)
    assert read / 3 < large.bytes_per_s < read
    assert found.host_bytes_per_s > 1e9 and 5e9 < found.pinned_bytes_per_s < 500e9
    for rate in found.matmuls:
        if rate.m <= 16 and rate.n * rate.k >= 4096 * 14336:  # streams the weight
            assert read / 3 < 2 * rate.n * rate.k / (2 * rate.m * rate.n * rate.k / rate.flops_per_s) < read
    assert [one.seq_len for one in found.attentions] == [512, 2048, 8192, 32768]
    for one in found.attentions:
        assert peak / 20 < one.train_flops_per_s < one.forward_flops_per_s < peak
    assert found.with_kernels == {"bfloat16"} and all(read / 4 < one.bytes_per_s < 1.1 * read for one in found.kernels)
    assert all(0.6 < share <= 1.0 for share in found.sustained.values()) and "bfloat16" in found.sustained
    large = [one for one in found.fp8 if one.m == 16384 and one.n == 14336 and one.recipe == "rowwise"]
    assert len(large) == 4 and all(peak / 2 < one.flops_per_s < 2 * peak for one in large)
