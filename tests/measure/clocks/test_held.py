"""What is set on a GPU is restored: after the block, on an error, on signals, and after a kill by the next process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hone.base.errors import MachineError
from hone.measure.clocks.held import FULL, Setting, holding, restore_left
from hone.measure.clocks.nvml import NvmlError
from tests.conftest import ROOT
from tests.measure.clocks.plant import FilePlant, Plant

CHILD = """
import sys, time
from pathlib import Path
from hone.measure.clocks.held import Setting, holding
from tests.measure.clocks.plant import FilePlant

with holding(FilePlant(Path(sys.argv[1])), Path(sys.argv[2])) as held:
    held.set(Setting(1200, 450.0))
    print("set", flush=True)
    time.sleep(60)
"""


def child(gpu: Path, notes: Path) -> subprocess.Popen:
    """A process that has set a clock and a limit, and waits."""
    found = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(gpu), str(notes)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert found.stdout.readline() == "set\n"
    return found


def test_a_block_restores_what_was_there(tmp_path):
    gpu = Plant(limit=650.0)
    with pytest.raises(KeyError), holding(gpu, tmp_path) as held:
        held.set(Setting(sm_mhz=1200))
        held.set(Setting(sm_mhz=900, limit_w=400.0))
        assert (gpu.locked, gpu.limit) == (900, 400.0)
        assert json.loads((tmp_path / "GPU-plant.json").read_text())["limit_before_w"] == 650.0
        held.set(FULL)
        assert (gpu.locked, gpu.limit) == (None, 650.0)
        held.set(Setting(limit_w=300.0))
        raise KeyError("inside")
    assert (gpu.locked, gpu.limit) == (None, 650.0)
    assert list(tmp_path.glob("*.json")) == []


def test_one_who_sets_nothing_changes_nothing(tmp_path):
    gpu = Plant(locked=1500)  # by an administrator
    with holding(gpu, tmp_path):
        pass
    assert gpu.locked == 1500 and gpu.calls == []


def test_the_same_setting_is_not_set_twice(tmp_path):
    gpu = Plant()
    with holding(gpu, tmp_path) as held:
        held.set(Setting(sm_mhz=1200))
        held.set(Setting(sm_mhz=1200))
    assert gpu.calls == ["lock 1200", "reset"]


def test_a_refusal_changes_nothing_and_leaves_no_note_behind(tmp_path):
    gpu = Plant(permitted=False)
    with holding(gpu, tmp_path) as held, pytest.raises(NvmlError, match="not permitted") as caught:
        held.set(Setting(sm_mhz=1200))
    assert caught.value.refused and held.now == FULL
    assert list(tmp_path.glob("*.json")) == []


def test_a_cache_that_cannot_be_written_is_one_error_and_nothing_is_set(tmp_path):
    (tmp_path / "file").write_text("")
    gpu = Plant()
    with pytest.raises(MachineError, match="not writable"), holding(gpu, tmp_path / "file" / "clocks"):
        pass
    assert gpu.calls == []


def test_two_cannot_hold_one_gpu(tmp_path):
    with holding(Plant(), tmp_path), pytest.raises(MachineError, match="another process holds the clocks"):  # noqa: SIM117
        with holding(Plant(), tmp_path):
            pass
    with holding(Plant(), tmp_path):  # free again
        pass


def test_after_kill_9_the_next_start_restores(tmp_path):
    gpu, notes = tmp_path / "gpu.json", tmp_path / "notes"
    killed = child(gpu, notes)
    assert restore_left(lambda uuid: FilePlant(gpu), notes) == []  # its holder lives
    killed.kill()
    killed.wait()
    assert json.loads(gpu.read_text()) == [1200, 450.0]
    said = restore_left(lambda uuid: FilePlant(gpu), notes)
    assert said == ["the clocks and power limit of GPU-plant, which a killed process had set, are restored"]
    assert json.loads(gpu.read_text()) == [None, 700.0]
    assert restore_left(lambda uuid: FilePlant(gpu), notes) == []


def test_a_new_holder_restores_what_a_killed_one_left(tmp_path):
    gpu, notes = tmp_path / "gpu.json", tmp_path / "notes"
    killed = child(gpu, notes)
    killed.kill()
    killed.wait()
    plant = FilePlant(gpu)
    with holding(plant, notes) as held:
        assert (plant.locked, plant.limit) == (None, 700.0)
        held.set(Setting(sm_mhz=800))
    assert json.loads(gpu.read_text()) == [None, 700.0]


def test_sigterm_restores_and_ends_the_process(tmp_path):
    gpu, notes = tmp_path / "gpu.json", tmp_path / "notes"
    ended = child(gpu, notes)
    ended.send_signal(signal.SIGTERM)
    assert ended.wait(60) == -signal.SIGTERM
    assert json.loads(gpu.read_text()) == [None, 700.0] and list(notes.glob("*.json")) == []


def note(notes: Path, setting: Setting) -> Path:
    """The note of a process that had `setting` and was killed."""
    gpu, left = Plant(limit=700.0), notes / "GPU-plant.json"
    with holding(gpu, notes) as held:
        held.set(setting)
        kept = left.read_bytes()
    left.write_bytes(kept)
    return left


def test_what_cannot_be_restored_stays_noted(tmp_path):
    left = note(tmp_path, Setting(sm_mhz=900))
    said = restore_left(lambda uuid: Plant(permitted=False, locked=900), tmp_path)
    assert "cannot be restored" in said[0] and left.exists()
    gpu = Plant(locked=900)
    assert "are restored" in restore_left(lambda uuid: gpu, tmp_path)[0] and gpu.locked is None
    assert not left.exists()


@pytest.mark.parametrize(
    ("setting", "since"),
    [
        (Setting(sm_mhz=900), Plant(locked=1500)),  # somebody has locked another clock since
        (Setting(sm_mhz=900), Plant(locked=600)),
        (Setting(limit_w=400.0), Plant(locked=900)),  # no clock was locked by the killed one
        (Setting(limit_w=400.0), Plant(limit=350.0)),
        (Setting(sm_mhz=900, limit_w=400.0), Plant(locked=1200, limit=500.0)),
    ],
)
def test_what_somebody_else_has_set_since_stays(tmp_path, setting, since):
    note(tmp_path, setting)
    restore_left(lambda uuid: since, tmp_path)
    assert since.calls == []
    with holding(since, tmp_path):
        pass
    assert since.calls == []


def test_a_clock_that_is_lower_now_is_said_and_left(tmp_path):
    left = note(tmp_path, Setting(sm_mhz=900))
    (said,) = restore_left(lambda uuid: Plant(locked=600), tmp_path)
    assert "nvidia-smi -rgc" in said and left.exists()


@pytest.mark.parametrize("change", ["boot", "cut off"])
def test_a_note_of_another_boot_or_one_cut_off_sets_nothing(tmp_path, change):
    left, gpu = note(tmp_path, Setting(900, 400.0)), Plant(locked=900, limit=400.0)
    if change == "boot":
        left.write_text(json.dumps(json.loads(left.read_text()) | {"boot": "an earlier one"}))
    else:
        left.write_text('{"limit_bef')
    assert restore_left(lambda uuid: gpu, tmp_path) == [] and gpu.calls == [] and not left.exists()


def test_a_limit_of_somebody_else_is_not_set_back_with_a_clock(tmp_path):
    gpu = Plant()
    with holding(gpu, tmp_path) as held:
        held.set(Setting(limit_w=400.0))
        held.set(Setting(sm_mhz=900))  # the limit is given back
        gpu.limit = 350.0  # by an administrator
    assert gpu.limit == 350.0 and gpu.locked is None


def test_a_fork_restores_nothing(tmp_path):
    gpu = FilePlant(tmp_path / "gpu.json")
    with holding(gpu, tmp_path) as held:
        held.set(Setting(sm_mhz=900))
        if (child := os.fork()) == 0:
            held.restore()
            os._exit(0)
        os.waitpid(child, 0)
        assert json.loads(gpu.path.read_text())[0] == 900 and (tmp_path / "GPU-plant.json").exists()
