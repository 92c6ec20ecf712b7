"""Money and carbon of artifacts: by hand from their figures, absent with a reason, and nothing without stated rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.base.durable import write_jsonl
from hone.cli.dispatch import main
from hone.report import build
from hone.report.collect import collect
from hone.report.sections.prices import Prices, Rates
from tests.report.lines import LineMaker


def _line(folder: Path, energy: bool) -> Path:
    maker = LineMaker(folder, energy=energy)
    draft = maker.begin("train", "base", {"steps": 3})
    draft.record("time_s", 7200.0, "s")
    draft.record("tokens_per_s", 500.0, "tokens/s")
    draft.record("train_tokens", 3_000_000, "tokens")
    draft.record("energy_j", 3.6e6 if energy else None, "J", note="" if energy else "no RAPL on this machine")
    rows = [
        {"step": 0, "tokens": 1000},
        {"step": 0, "val_loss": 4.0},
        {"step": 1, "tokens": 2000},
        {"step": 1, "val_loss": 2.4},
    ]
    write_jsonl(draft.folder / "steps.jsonl", rows)
    draft.commit()
    draft = maker.begin("serve", "bench", {})
    draft.record("time_s", 60.0, "s")
    draft.record("tokens_per_s", 11_406.0, "tokens/s")
    draft.record(
        "joules_per_token", 0.0614 if energy else None, "J/token", note="" if energy else "no RAPL on this machine"
    )
    draft.record("energy_j", 900.0 if energy else None, "J", note="" if energy else "no RAPL on this machine")
    draft.commit()
    return folder


def test_figures_follow_from_the_artifacts(tmp_path: Path):
    line = collect(_line(tmp_path, energy=True))
    line.rates = Rates(3.4, 400.0, "as given", 1.5, 2.5)
    found = {bill.row.kind: {one.name: one.value for one in bill.figures} for bill in Prices.of(line).bills}
    assert found["train"] == {
        "time": 7200.0,
        "energy": 3.6e6,
        "price": pytest.approx(6.8),
        "price of a million tokens": pytest.approx(6.8 / 3),
        "CO2e": pytest.approx(600.0),  # 1 kWh, PUE 1.5, 400 g
        "CO2e of a million tokens": pytest.approx(200.0),
        "time to the loss": pytest.approx(4.0),  # 2,000 tokens at 500 a second
    }
    assert found["serve"]["price of a million tokens"] == pytest.approx(0.0828, abs=1e-4)
    assert found["serve"]["CO2e of a million tokens"] == pytest.approx(0.0614e6 / 3.6e6 * 600)


def test_what_was_not_measured_has_a_reason(tmp_path: Path):
    line = collect(_line(tmp_path, energy=False))
    line.rates = Rates(None, 400.0, "as given", 1.0, 2.0)
    train = {one.name: one for bill in Prices.of(line).bills if bill.row.kind == "train" for one in bill.figures}
    assert train["CO2e"].value is None and train["CO2e"].note == "no RAPL on this machine"
    assert {one.shown for one in train.values()} == {"2 h 00 min", "not known"}
    assert Prices.of(line).unknown == (
        "Not known: energy, CO2e, CO2e of a million tokens of train-base, serve-bench (no RAPL on this machine).",
        "Not known: time to the loss of train-base (the lowest was 2.4).",
    )
    assert train["CO2e of a million tokens"].value is None
    assert "price" not in train


def test_the_report_has_the_section_where_rates_are_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = _line(tmp_path / "mine", energy=True)
    build(folder)
    assert "prices" not in json.loads((folder / "report/report.json").read_text())
    assert 'id="prices"' not in (folder / "report/index.html").read_text()
    assert main(["report", str(folder), "--price_per_hour=3.4", "--grid=FR", "--target_loss=2.5"]) == 0
    values = json.loads((folder / "report/report.json").read_text())["prices"]
    assert values["rates"]["g_per_kwh"] == pytest.approx(56.0) and "2023" in values["rates"]["source"]
    assert '<section id="prices">' in (folder / "report/index.html").read_text()
    assert "## Cost" in (folder / "report/report.md").read_text()
    assert main(["report", str(folder), "--price_per_hour=cheap"]) == 2
    assert "--price_per_hour=cheap is not a number" in capsys.readouterr().err
    assert main(["report", str(folder), "--grid=Mars"]) == 2
    assert "no grid 'Mars' in the catalogue" in capsys.readouterr().err
