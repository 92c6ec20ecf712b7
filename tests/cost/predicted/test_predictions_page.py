"""The page of predictions is that of the ledger: every row is counted, and lines of each room come out as they stand there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import predictions
from benchmarks.ledger import FOLDER
from benchmarks.predicted import configs, page, rates, rows
from benchmarks.predicted.rows import SOURCES, Left, Pair

FIX = f"run {page.COMMAND}"


@pytest.fixture(scope="module")
def found() -> tuple[list[Pair], Left, int]:
    return rows.all_pairs()


def test_every_row_is_a_pair_or_has_a_reason(found: tuple[list[Pair], Left, int]) -> None:
    pairs, left, total = found
    assert total == sum(len(rows.read(FOLDER / f"{name}.jsonl")) for name in SOURCES)
    assert len({pair.source for pair in pairs}) + sum(left.counts.values()) == total
    text = page.PAGE.read_text(encoding="utf8")
    assert "\n".join(page.left_out(left)) in text, FIX
    assert f"| {len(pairs):,} pairs" in text or f"{len(pairs):,} pairs" in text, FIX


def test_lines_stand_in_the_page_as_today_s_estimates_make_them(found: tuple[list[Pair], Left, int]) -> None:
    text = page.PAGE.read_text(encoding="utf8").splitlines()
    pairs = found[0]
    picked = [next(one for one in pairs if one.room == room and one.config) for room in ("training", "compression")]
    picked += [next(one for one in pairs if one.config and one.config.get("load") == "batch 1")]
    picked += [one for one in pairs if not one.config][::8]
    for pair in picked:
        assert page.row_of(page.line_of(pair)) in text, f"{pair.source}: {FIX}"


def test_errors_are_of_seconds_and_bytes() -> None:
    row = {"machine": {}}
    rate = Pair("s", "training", "time", "f", "tokens/s", 100.0, 80.0, None, None, row)
    assert rate.off(rate.recorded) == pytest.approx(0.25)  # a rate predicted too low is a time predicted too long
    seconds = Pair("s", "compression", "time", "f", "s", 2.0, 1.0, None, None, row)
    assert seconds.off(seconds.recorded) == pytest.approx(-0.5)
    assert page.spread([-0.1, None, 0.3, 0.2]) == (3, 0.2, 0.3)
    assert page.spread([None]) is None


def test_names_of_rows_say_configurations() -> None:
    machine = {"num_ranks": 2}
    row = {"figure": "llama3-8b, 16 layers on 2 GPUs, fp8, 1 x 8192 a GPU, compiled: zero2", "machine": machine}
    found = configs.config_of("train", row)
    assert found == {
        "room": "training", "shape": "llama3-8b", "layers": 16, "batch_size": 2, "seq_len": 8192, "precision": "fp8",
        "ranks": 2, "passes": 1, "compiled": True, "parallelism": {"data_parallel": "zero2"},
    }  # fmt: skip
    assert configs.config_of("train", row | {"figure": row["figure"].replace("zero2", "fsdp2")}) == configs.PEER
    assert configs.config_of("train", row | {"config": {"room": "training"}}) == {"room": "training"}
    assert configs.config_of("compress", {"figure": "perplexity, tiny"}) == configs.QUALITY


def test_a_call_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, given = tmp_path / "ledger", tmp_path / "call"
    ledger.mkdir(), given.mkdir()
    machine = {"device": "cuda", "gpus": [{"name": "NVIDIA H200"}], "num_ranks": 1}
    row = {"benchmark": "train", "figure": "f", "value": 1.0, "calibration": "abc", "time": "t", "machine": machine}
    (given / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (given / "calibration-abc.json").write_text(rates.h200().calibration.model_dump_json())
    (ledger / "train.jsonl").write_text("")
    monkeypatch.setattr(predictions.ledger, "FOLDER", ledger)
    monkeypatch.setattr(rates, "CALIBRATIONS", ledger / "calibrations")
    rates.stored.cache_clear()
    assert (predictions.take(given), predictions.take(given)) == (1, 0)
    assert rows.read(ledger / "train.jsonl") == [row]
    known = rates.measured(row)
    assert known is not None and known.fresh and known.machine.calibration == rates.h200().calibration
    other = rates.measured({**row, "calibration": ""})
    assert other is not None and not other.fresh and "abc" in other.what
    unlike = {**row, "calibration": "", "machine": {**machine, "gpus": [{"name": "Unlisted"}]}}
    assert rates.measured(unlike) is None and rates.of_sheet(unlike) is None, "no rates of another GPU"
    with pytest.raises(SystemExit, match="has no rows"):
        predictions.take(tmp_path)
    rates.stored.cache_clear(), rates.kept.cache_clear()


def test_reasons_are_counted() -> None:
    left = Left(Counter())
    left.add("train", "a"), left.add("train", "a")
    assert page.left_out(left)[2:] == ["| train | 2 | a |"]
