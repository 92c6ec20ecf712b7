"""Live joules of a server: in its metrics where its devices have a meter, absent where one has none."""

from __future__ import annotations

import pytest

from hone.serve.device import metered as module
from hone.serve.device.metered import Metered, metered
from hone.serve.http.metrics import ServerMetrics
from hone.serve.http.processes.board import EngineReport, added


class FakeMeter:
    """A device of 100 J a reading; `cuda:1` has no sensor where `blind`."""

    blind = False
    made: list[FakeMeter] = []  # noqa: RUF012

    def __init__(self, device: str) -> None:
        self.device, self.readings, self.running = device, 0, False
        FakeMeter.made.append(self)

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def joules(self) -> float | None:
        assert self.running
        self.readings += 1
        return None if self.blind and self.device == "cuda:1" else 100.0 * (self.readings - 1)


class FakeEngine:
    output_tokens = 0

    def stats(self) -> dict[str, float]:
        return {"steps": 1, "output_tokens": self.output_tokens}


@pytest.fixture(autouse=True)
def meters(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMeter.made, FakeMeter.blind = [], False
    monkeypatch.setattr(module, "Meter", FakeMeter)


def lines(engine: Metered | FakeEngine) -> dict[str, float]:
    text = ServerMetrics("m", engine.stats).text().decode()
    found = [line for line in text.splitlines() if not line.startswith("#") and "joules" in line]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in found}


def test_all_gpus_of_an_engine_are_counted():
    engine = metered(FakeEngine(), "cuda", 2)
    assert [one.device for one in FakeMeter.made] == ["cuda:0", "cuda:1"]
    assert lines(engine) == {"hone:energy_joules_total": 200.0}, "no token yet"
    engine._engine.output_tokens = 50
    assert lines(engine) == {"hone:energy_joules_total": 400.0, "hone:joules_per_token": 8.0}


def test_without_a_meter_there_is_no_metric():
    FakeMeter.blind = True
    own = FakeEngine()
    assert metered(own, "cuda", 2) is own
    assert not any(one.running for one in FakeMeter.made)
    own.output_tokens = 50
    assert lines(own) == {}


def test_engines_have_gpus_of_their_own_and_share_a_processor():
    def total(device: str) -> dict[str, float]:
        reports = [EngineReport(stats=metered(FakeEngine(), device).stats()) for _ in range(2)]
        return added(reports)

    assert total("cuda:3")["energy_joules"] == 200.0
    shared = total("cpu")
    assert shared["processor_joules"] == 100.0
    assert "hone:energy_joules_total" in lines(type("E", (), {"stats": lambda self: shared})())
