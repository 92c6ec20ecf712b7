"""The options of a clock policy, and work that is done under one."""

from __future__ import annotations

import pytest

from hone.base.errors import MachineError, SpecError
from hone.cli.options import circumstances
from hone.measure.clocks.governed import from_options, governed
from hone.measure.clocks.nvml import NvmlError
from hone.serve.device.clocked import Clocked
from tests.measure.clocks.plant import Plant


def test_options_become_a_policy():
    options = {"clock.kind": "zeus", "clock.eta": "0.7", "clock.settings": "6", "redo": "true"}
    found = from_options(options, "cuda:0")
    assert found["kind"] == "zeus" and found["eta"] == 0.7 and found["settings"] == 6
    assert from_options({"redo": "true"}, "cuda") is None


@pytest.mark.parametrize(
    ("options", "device", "waits", "error", "said"),
    [
        ({"clock.eta": "1"}, "cuda", False, SpecError, "--clock.eta without a policy"),
        ({"clock.kind": "zeuss"}, "cuda", False, SpecError, "did you mean 'zeus'"),
        ({"clock.kind": "zeus", "clock.eta": "3"}, "cuda", False, SpecError, "eta"),
        ({"clock.kind": "fixed"}, "cuda", False, SpecError, "sets nothing"),
        ({"clock.kind": "by_phase"}, "cpu", False, MachineError, "this runs on cpu"),
        ({"clock.kind": "max_slowdown"}, "cuda", True, SpecError, "a server waits for requests"),
    ],
)
def test_wrong_options_are_named(options, device, waits, error, said):
    with pytest.raises(error, match=said):
        from_options(options, device, waits=waits)


def test_the_command_line_refuses_a_clock_of_a_cpu():
    with pytest.raises(MachineError, match="this runs on cpu"):
        circumstances({"clock.kind": "by_phase"})
    assert circumstances({}).clock is None


def test_work_is_governed_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu, said = Plant(), []
    policy = {"kind": "fixed", "sm_mhz": 1200}
    with governed(policy, "cuda:0", said.append, open_one=lambda device: (gpu, device)) as governor:
        assert gpu.locked == 1200 and list((tmp_path / "hone" / "clocks").glob("*.json"))
        governor.worked(1)
    assert gpu.locked is None and not list((tmp_path / "hone" / "clocks").glob("*.json"))
    with governed(None, "cuda:0", said.append) as nothing:
        assert nothing is None
    with governed(policy, "cuda:0", said.append, open_one=lambda device: (None, "no library")) as nothing:
        assert nothing is None
    assert said == ["note: clock fixed sets nothing: no library"]


def test_an_engine_tells_its_steps():
    told = []

    class Engine:
        prompt = output = 0
        cache_bytes = 7

        def step(self):
            self.prompt, self.output = (64, 0) if not self.prompt else (64, self.output + 4)
            return ["out"]

        def stats(self):
            return {"prompt_tokens": self.prompt, "output_tokens": self.output}

    class Governor:
        def worked(self, units, phase):
            told.append((units, phase))

    engine = Clocked(Engine(), Governor())
    assert [engine.step() for _ in range(3)] == [["out"]] * 3 and engine.cache_bytes == 7
    assert told == [(0, "prefill"), (4, "decode"), (4, "decode")]


def test_a_gpu_that_lists_no_clocks_is_worked_on_without_a_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Silent(Plant):
        def supported_mhz(self):
            raise NvmlError("nvmlDeviceGetSupportedGraphicsClocks", 3)

    said = []
    with governed({"kind": "thermal"}, "cuda", said.append, open_one=lambda device: (Silent(), "")) as governor:
        assert governor is None
    assert len(said) == 1 and "sets nothing" in said[0] and "not supported" in said[0]


def test_a_clock_that_the_gpu_has_not_is_an_error_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Strict(Plant):
        def lock_clocks(self, mhz):
            raise NvmlError("nvmlDeviceSetGpuLockedClocks", 2)

    clock = {"kind": "fixed", "sm_mhz": 9000}
    gpu = Strict()
    with pytest.raises(MachineError, match="9000 MHz cannot be set") as caught:  # noqa: SIM117
        with governed(clock, "cuda", print, open_one=lambda device: (gpu, "")):
            raise AssertionError("begun")
    assert "SUPPORTED_CLOCKS" in str(caught.value) and gpu.calls == []
