"""The machine's facts against psutil, and the calibration's cache."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from hone.base.errors import MachineError
from hone.measure import calibrate as micro
from hone.measure.calibration import Calibration, keep_calibration, read_calibration
from hone.measure.machine import Machine, describe, identity


def test_facts():
    machine = describe()
    assert machine.num_threads <= len(os.sched_getaffinity(0))
    assert 1 <= machine.num_cores <= machine.num_threads
    assert 0 < machine.ram_bytes <= psutil.virtual_memory().total
    assert machine.cpu and machine.gpus == () and machine.torch
    assert Machine.model_validate(machine.model_dump(mode="json")) == machine


def test_affinity_is_respected():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from hone.measure.machine import describe; "
    code += "import sys; m = describe(); print(m.num_threads, m.num_cores, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["1", "1", "False"]


def test_a_missing_gpu_is_a_users_mistake():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MachineError, match="no device cuda"):
        describe("cuda")


@pytest.mark.slow
def test_calibration_is_kept_and_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(micro, "BUDGET_S", 0.05)
    monkeypatch.setattr(micro, "SHAPES", [(1, 64, 64), (64, 64, 64)])
    monkeypatch.setattr(micro, "GRADIENT_SHAPES", [(64, 64, 64)])
    monkeypatch.setattr(micro, "_ATTENTION", (1, 2, 32, 16))
    monkeypatch.setattr(micro, "_COPY_BYTES", (1 << 12, 1 << 16))
    monkeypatch.setattr(micro, "disturbance", lambda *_: "")  # whatever else this machine does now
    describe.cache_clear()
    assert describe().calibration is None
    found = micro.calibrate()
    assert describe().calibration == found and micro.calibrate() is not None
    assert found.dtypes == ("float32",) and found.peak_flops_per_s("float32") > 0
    assert found.peak_flops_per_s("bfloat16") is None
    both = micro.calibrate(dtype="bfloat16")
    assert set(both.dtypes) == {"float32", "bfloat16"}
    assert [rate for rate in both.matmuls if rate.dtype == "float32"] == list(found.matmuls)
    assert all(len(row) == 2 for row in both.table())
    describe.cache_clear()


def test_a_broken_cache_file_is_no_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    who = identity(describe())
    made = Calibration(
        device="x", threads=1, torch="2", read_bytes_per_s=1, copies=(), matmuls=(), attentions=(), op_s=1, exp_per_s=1
    )
    path = keep_calibration(who, made)
    assert read_calibration(who) == made
    path.write_text(path.read_text()[:-5])
    assert read_calibration(who) is None
    assert read_calibration({**who, "threads": "99"}) is None


def test_a_cache_that_cannot_be_kept_or_read_is_not_fatal(tmp_path, monkeypatch):
    who = {"device": "x"}
    kept = Calibration(
        device="x", threads=1, torch="2", read_bytes_per_s=1, copies=(), matmuls=(), attentions=(), op_s=1, exp_per_s=1
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = keep_calibration(who, kept)
    assert path is not None and read_calibration(who) == kept
    for damage in (b"\xff\xfe", b"{", path.read_bytes().replace(b'"op_s": 1', b'"op_s": 0')):
        path.write_bytes(damage)
        assert read_calibration(who) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file, no folder
    with pytest.warns(UserWarning, match="cannot be stored"):
        assert keep_calibration(who, kept) is None
    assert read_calibration(who) is None
