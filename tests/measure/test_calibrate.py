"""A calibration is the best of rounds spread in time; one that other work disturbed is stored once, marked and said."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hone.measure import calibrate as micro
from hone.measure.calibration import read_calibration
from hone.measure.load import Load
from hone.measure.machine import describe, identity
from hone.measure.scratch import here, scratch


class Clock:
    """Time that passes only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, *seconds: float):
        """Work that takes these seconds, call after call; the last ones for ever."""
        left = list(seconds)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def load(at_s: float, own_s: float, busy_s: float | None, average: float = 0.0, processors: int = 2) -> Load:
    return Load(at_s, own_s, busy_s, average, processors)


def test_the_median_of_several_tries():
    clock = Clock()
    timer = micro.Timer("cpu", clock)
    assert timer.typical(micro.Probe(clock.work(3.0, 1.0, 2.0), 1, 0), 5.0) == 2.0
    assert clock.now == 6.0
    assert timer.typical(micro.Probe(clock.work(8.0), 1, 0), 5.0) == 8.0  # one try in any case
    assert timer.typical(micro.Probe(clock.work(1.0, 2.0, 6.0), 1, 0, inner=3), 1.0) == 3.0


def test_on_a_gpu_a_try_is_many_calls(monkeypatch):
    clock = Clock()
    timer = micro.Timer("cuda", clock)
    waits = []
    monkeypatch.setattr(timer, "wait", lambda: waits.append(clock.now))
    calls = []

    def work() -> None:
        calls.append(1)
        clock.now += 1e-4

    assert timer.typical(micro.Probe(work, 1, 0), 0.0) == pytest.approx(1e-4)
    assert len(calls) == 2 + 10 and len(waits) == 3


def test_a_burst_of_other_work_does_not_meet_every_round(monkeypatch):
    monkeypatch.setattr(micro, "BUDGET_S", 1e9)
    clock = Clock()
    probes = {  # a call to wake up, then one a round
        "first": micro.Probe(clock.work(50.0, 9.0, 1.0, 1.2), 1, 0),
        "second": micro.Probe(clock.work(50.0, 2.0, 18.0, 2.0), 1, 0),
    }
    seconds = micro.rounds(micro.Timer("cpu", clock), probes)
    assert seconds == {"first": pytest.approx([9.0, 1.0, 1.2]), "second": pytest.approx([2.0, 18.0, 2.0])}
    assert len(seconds["first"]) == micro.ROUNDS


def test_where_one_round_takes_too_long_it_stays_the_only_one(monkeypatch):
    monkeypatch.setattr(micro, "BUDGET_S", 4.0)
    clock = Clock()
    assert micro.rounds(micro.Timer("cpu", clock), {"x": micro.Probe(clock.work(3.0), 1, 0)}) == {"x": [3.0]}


QUIET = {"a": [1.0, 1.1, 1.0], "b": [2.0, 2.0, 2.3], "c": [1.0, 5.0, 1.0]}


def test_at_rest_there_is_nothing_to_say():
    assert micro.disturbance(load(0, 0, 0), load(5, 9, 9.5), 2, QUIET) == ""
    assert micro.disturbance(load(0, 0, None, 0.2), load(5, 9, None, 2.0), 2, QUIET) == ""
    assert micro.disturbance(load(0, 0, 0), load(5, 5, 5), 2, {"a": [1.0]}) == ""


def test_others_on_the_processors_are_said():
    said = micro.disturbance(load(0, 0, 0), load(5, 5, 10), 2, QUIET)
    assert said == "other work took 1.0 of its 2 processors"
    assert "3.0 of its 2" in micro.disturbance(load(0, 0, None, 3.0), load(5, 9, None, 3.0), 2, QUIET)
    # Half of many processors are enough for a calibration on few of them.
    assert micro.disturbance(load(0, 0, 0, processors=16), load(5, 5, 45, processors=16), 1, QUIET) == ""
    assert micro.disturbance(load(0, 0, 0, processors=16), load(5, 5, 45, processors=16), 16, QUIET)


def test_rounds_that_differ_are_said():
    shaken = {"a": [1.0, 2.0, 1.0], "b": [2.0, 3.0, 2.3], "c": [1.0, 1.0, 1.0]}
    assert "1.5 times as long" in micro.disturbance(load(0, 0, 0), load(5, 9, 9), 2, shaken)


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {
        "BUDGET_S": 0.02, "SHAPES": [(1, 64, 64), (8, 64, 64)], "GRADIENT_SHAPES": [(8, 64, 64)],
        "_ATTENTION": (1, 2, 32, 16), "_COPY_BYTES": (1 << 12, 1 << 16), "_GATHER_BYTES": (1 << 14, 1 << 16), "_READ_BYTES": 1 << 16, "_FILE_BYTES": 1 << 16,
    }.items():  # fmt: skip
        monkeypatch.setattr(micro, name, value)
    describe.cache_clear()
    yield monkeypatch
    describe.cache_clear()


def test_a_disturbed_calibration_is_stored_and_marked(small):
    who = identity(describe())
    small.setattr(micro, "disturbance", lambda *_: "other work took 1.9 of its 2 processors")
    with pytest.warns(UserWarning, match=r"busy while it was calibrated: other work took 1.9 .* used until") as said:
        busy = micro.calibrate()
    # A garbage collection may warn of what other tests left open.
    assert len([one for one in said if issubclass(one.category, UserWarning)]) == 1
    assert busy.peak_flops_per_s("float32") > 0 and read_calibration(who) == busy == describe().calibration
    assert busy.busy == {"float32": "other work took 1.9 of its 2 processors"} and "1.9 of its 2" in busy.doubt
    assert ("float32 measured beside other work", busy.busy["float32"]) in busy.table()
    with pytest.MonkeyPatch.context() as only:
        only.setattr(micro, "rounds", lambda *_: pytest.fail("the next command measures again"))
        assert micro.calibrate() == busy

    small.setattr(micro, "disturbance", lambda *_: "")
    kept = micro.calibrate(fresh=True)
    assert read_calibration(who) == kept == describe().calibration and not kept.busy and not kept.doubt

    small.setattr(micro, "disturbance", lambda *_: "busy again")
    with pytest.warns(UserWarning, match="busy again.* stored before stay"):
        micro.calibrate(fresh=True)
    assert read_calibration(who) == kept, "worse rates replace no better ones"
    assert micro.calibrate() == kept  # without a word: nothing was measured


def test_a_second_dtype_joins_the_first_and_each_has_its_mark(small):
    small.setattr(micro, "disturbance", lambda *_: "")
    first = micro.calibrate(dtype="float32")
    small.setattr(micro, "disturbance", lambda *_: "busy")
    with pytest.warns(UserWarning, match="busy"):
        second = micro.calibrate(dtype="bfloat16")
    assert set(second.dtypes) == {"float32", "bfloat16"} and [*second.busy] == ["bfloat16"]
    kept = read_calibration(identity(describe()))
    assert set(kept.dtypes) == {"float32", "bfloat16"} == {rate.dtype for rate in kept.attentions}
    assert kept.busy == second.busy and kept.op_s == first.op_s, "what both share is of the idle machine"
    assert kept.joined(first).busy == kept.busy and second.joined(None) == second
    small.setattr(micro, "disturbance", lambda *_: "")
    assert not micro.calibrate(dtype="bfloat16", fresh=True).busy


def test_a_mark_stays_with_its_dtype_when_another_is_measured(small):
    small.setattr(micro, "disturbance", lambda *_: "busy")
    with pytest.warns(UserWarning, match="busy"):
        micro.calibrate(dtype="float32")
    small.setattr(micro, "disturbance", lambda *_: "")
    assert micro.calibrate(dtype="bfloat16").busy == {"float32": "busy"}


def test_every_point_has_a_rate(small):
    small.setattr(micro, "disturbance", lambda *_: "")
    found = micro.calibrate()
    assert [(rate.layout, rate.m, rate.n, rate.k) for rate in found.matmuls] == [
        ("forward", 1, 64, 64), ("forward", 8, 64, 64), ("input_gradient", 8, 64, 64), ("weight_gradient", 64, 64, 8),
    ]  # fmt: skip
    assert [copy.num_bytes for copy in found.copies] == [1 << 12, 1 << 16]
    assert [gather.num_bytes for gather in found.gathers] == [1 << 14, 1 << 16]
    assert found.durable_s > 0 and found.disk_bytes_per_s > 0 and found.host_bytes_per_s is None
    (attention,) = found.attentions
    assert attention.forward_flops_per_s > 0 and attention.train_flops_per_s > 0


def test_rates_that_are_not_kept_are_measured_and_those_that_are_stored_taken(small):
    quick = micro.calibrate("cpu", keep=False)
    assert quick.matmuls and read_calibration(identity(describe("cpu"))) is None
    stored = micro.calibrate("cpu")
    assert micro.calibrate("cpu", keep=False) == stored


def test_a_mapped_file_is_read_as_it_is(tmp_path):
    assert micro._mapped(tmp_path, "cpu") == {}
    (tmp_path / "large").write_bytes(bytes(range(256)) * 16)
    (probe,) = micro._mapped(tmp_path, "cpu").values()
    assert probe.amount == 4096 and probe.work().tolist() == [*range(256)] * 16


def test_the_disk_of_the_current_folder_is_measured(small, tmp_path):
    small.chdir(tmp_path)
    small.setattr(micro, "disturbance", lambda *_: "")
    assert here() == tmp_path
    micro.calibrate()
    assert not list(tmp_path.glob(".hone-calibrate-*"))
    small.setattr("os.access", lambda *_: False)
    assert here() != tmp_path


@pytest.mark.parametrize("full", ["hone.measure.calibrate.write_atomic", "hone.measure.scratch.tempfile.mkdtemp"])
def test_a_full_disk_costs_only_its_own_rate(small, tmp_path, full):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    small.chdir(tmp_path)
    small.setattr(micro, "disturbance", lambda *_: "")
    small.setattr(full, fails)
    with pytest.warns(UserWarning, match="the disk of the current folder was not measured"):
        found = micro.calibrate()
    assert found.durable_s is None and found.disk_bytes_per_s is None and found.read_bytes_per_s > 0
    assert not list(tmp_path.glob(".hone-calibrate-*"))


def test_scratch_folders_of_killed_processes_are_removed(tmp_path):
    code = "import sys, os, pathlib; from hone.measure.scratch import scratch\n"
    code += "with scratch(pathlib.Path(sys.argv[1])) as folder:\n"
    code += "    (folder / 'large').write_bytes(b'0' * 99); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    (left,) = tmp_path.glob(".hone-calibrate-*/large")
    with scratch(tmp_path) as mine:
        assert not left.parent.exists() and mine is not None
        with scratch(tmp_path) as other:
            assert mine.is_dir() and other.is_dir() and mine != other
    assert not list(tmp_path.iterdir())


def test_of_two_commands_at_once_one_measures(small):
    small.setattr(micro, "disturbance", lambda *_: "")
    began, may_end, real = threading.Event(), threading.Event(), micro.rounds
    measured = []

    def slow(*of):
        measured.append(1)
        began.set()
        assert may_end.wait(60)
        return real(*of)

    small.setattr(micro, "rounds", slow)
    with ThreadPoolExecutor(2) as pool:  # a lock is of the file opened, so that threads are apart like processes
        first = pool.submit(micro.calibrate)
        assert began.wait(60)
        second = pool.submit(micro.calibrate)
        may_end.set()
        assert first.result(60) == second.result(60) and len(measured) == 1


def test_what_decides_the_rates_is_in_the_name_of_their_file(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = describe()
    alike = identity(machine)
    assert identity(machine.model_copy(update={"ram_bytes": 1, "python": "3"})) == alike
    for change in (
        {"num_cores": 77},
        {"num_threads": 77},
        {"cpu": "other"},
        {"torch": "3"},
        {"cpu_isa_limit": "other"},
    ):
        assert identity(machine.model_copy(update=change)) != alike, change
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # on fewer processors than that they are others' rates
    assert identity(machine.model_copy(update={"num_cores": 1})) != identity(machine) != alike


def test_launch_time_is_subtracted_where_it_shows():
    names = {"op": 1.0, ("forward", 1, 64, 64): 100.0, ("copy", 8): 8.0, "read": 10.0, "softmax": 10.0}
    names |= {("attention", 32): 10.0, ("attention, trained", 32): 10.0, "small file": 1.0, "large file": 1.0}
    names |= {"to host": 1.0, "from host": 4.0}
    probes = {name: micro.Probe(lambda: None, amount, 0) for name, amount in names.items()}
    seconds = {name: [3.0, 2.0] for name in names} | {"op": [1.0], ("forward", 1, 64, 64): [5.0], ("copy", 8): [8.0]}

    def rates(cuda):
        made = micro._rates(describe(), "float32", 1, None, cuda, probes, seconds)
        assert made.pinned_bytes_per_s == (4.0 / 2 if cuda else None)
        return made.matmuls[0].flops_per_s, made.copies[0].bytes_per_s, made.read_bytes_per_s

    assert rates(cuda=False) == (100 / 4, 8 / 7, 10 / 2)
    assert rates(cuda=True) == (100 / 5, 8 / 8, 10 / 2)  # kernels queue up behind each other


def test_a_process_with_torch_is_measured_and_one_with_more_is_not(small):
    small.setattr(micro, "disturbance", lambda *_: "")
    small.setattr(micro, "resident_bytes", lambda: 9 << 30)
    assert micro.calibrate().process_bytes is None and describe().process_bytes < 500 << 20
    small.setattr(micro, "resident_bytes", lambda: 400 << 20)
    assert micro.calibrate(fresh=True).process_bytes == 400 << 20 < describe().process_bytes < 500 << 20
    small.setattr(micro, "resident_bytes", lambda: 9 << 30)
    assert micro.calibrate(fresh=True).process_bytes == 400 << 20, "what a smaller process measured stays"
