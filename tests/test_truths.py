"""Ledger rows of small truths: shares, differences and their intervals from what runs wrote, by hand."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import ledger
from benchmarks.distillations import PLAIN
from benchmarks.truths import common, forms, preferences, qat, rewards

T_95 = 4.302652729911275
"""Student's t of a two-sided 95 % interval of three numbers' mean."""


def header(module) -> dict:
    return {"stamp": {"commit": "abc", "dirty": False}, "sizes": module.SIZES, "model": "small"}


def test_recovered_shares_are_of_either_loss():
    found = {
        qat.FLOATS: {
            seed: {"given, None": 1.0, "given, row": 2.0, "trained": 1.5, "trained, row": 2.5} for seed in range(3)
        },
        "rounded, row": {0: {"trained": 1.5}, 1: {"trained": 1.6}, 2: {"trained": 1.4}},
    }
    of_given, of_floats = qat.rows(found, header(qat))
    assert of_given["value"] == pytest.approx(0.5) and of_floats["value"] == pytest.approx(1.0)
    assert of_given["interval"] == pytest.approx(T_95 * 0.1 / 3**0.5)


def test_a_run_that_was_cut_has_rows_of_what_ended(capsys):
    found = {
        qat.FLOATS: {0: {"given, None": 1.0, "given, row": 2.0, "trained": 1.5, "trained, row": 2.5}},
        "rounded, row": {0: {"trained": 1.5}, 1: {"trained": 1.4}},
        "rounded and taught, row": {1: {"trained": 1.4}},
    }
    (of_given,) = qat.rows(found, header(qat))
    assert of_given["value"] == pytest.approx(0.55) and of_given["n"] == 2
    assert "no row of rounded and taught, row: seeds [1]" in capsys.readouterr().out
    found[qat.FLOATS][1] = {**found[qat.FLOATS][0], "trained, row": 2.4}
    _, of_floats = qat.rows(found, header(qat))
    assert of_floats["value"] == pytest.approx((1.0 + 1.0 / 0.9) / 2)


def test_differences_are_of_the_same_seed():
    plain = {seed: {"loss": 3.0 + seed, "kl": 1.0, "own_kl": 2.0} for seed in range(3)}
    other = {seed: {"loss": 2.5 + seed, "kl": 1.0, "own_kl": 1.0} for seed in range(3)}
    rows = forms.rows({PLAIN: plain, "forward KL": other}, header(forms))
    loss = next(row for row in rows if "forward KL" in row["figure"] and "validation loss" in row["figure"])
    assert (loss["peer"], loss["difference"], loss["difference_interval"]) == (PLAIN, -0.5, 0.0)
    assert len(rows) == 6


def test_on_policy_stands_beside_the_same_loss_on_the_data_too():
    runs = {seed: {"loss": 3.0, "kl": 1.0, "own_kl": 2.0} for seed in range(2)}
    rows = forms.rows(dict.fromkeys((PLAIN, forms.ON_DATA, forms.ON_OWN), runs), header(forms))
    assert [row["peer"] for row in rows if forms.ON_OWN in row["figure"] and "student's text," not in row["peer"]][
        -2:
    ] == [PLAIN, forms.ON_DATA]


def test_the_growth_of_a_reward_and_margins_have_intervals():
    (row,) = rewards.rows(
        {rewards.SMALL: {seed: {"before": 0.3, "after": 0.5 + 0.1 * seed} for seed in range(3)}}, header(rewards)
    )
    assert row["difference"] == pytest.approx(0.3) and row["difference_interval"] == pytest.approx(T_95 * 0.1 / 3**0.5)
    margin, accuracy = preferences.rows(
        {"dpo": {seed: {"after, val_margin": 0.1, "after, val_accuracy": 0.6} for seed in range(3)}},
        header(preferences),
    )
    assert (margin["value"], accuracy["value"]) == pytest.approx((0.1, 0.6)) and margin["interval"] < 1e-12


def test_files_of_runs_become_rows_and_failures_do_not(tmp_path, monkeypatch, capsys):
    file = tmp_path / "runs.jsonl"
    lines = [header(rewards)] + [{"arm": rewards.SMALL, "seed": seed, "before": 0.1, "after": 0.2} for seed in (0, 1)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"arm": "cut in the mid')
    monkeypatch.setattr(ledger, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["rewards", "--from", str(file), "--name", "other"])
    common.main(rewards, "truths", rewards.options)
    (row,) = [json.loads(line) for line in (tmp_path / "truths.jsonl").read_text().splitlines()]
    assert row["commit"] == "abc" and row["benchmark"] == "truths" and row["n"] == 2
    assert "grew by" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="seed 3 failed"):
        common.found_of([{"arm": rewards.SMALL, "seed": 3, "error": "no"}])


def test_rows_of_a_run_elsewhere_are_kept_with_its_stamp(tmp_path):
    kept = ledger.Kept(tmp_path / "rows.jsonl", "cpu", commit="abc")
    kept.add({"figure": "one", "value": 1.0})
    stamp, rows = ledger.Kept.read(kept.path)
    assert (stamp["commit"], stamp["dirty"], rows) == ("abc", False, [{"figure": "one", "value": 1.0}])
