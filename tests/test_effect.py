"""The comparison of arms over seeds: numbers from manifests, intervals as scipy's test gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy.stats import ttest_ind

from benchmarks.effect import row

ARMS = {"train-random": [4.335, 4.267, 4.209], "train-staged": [4.064, 4.137, 4.179], "train-random-late": [9.0, 9.0]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for arm, values in ARMS.items():
        for seed, value in enumerate(values):
            figures = [{"name": "time_s", "value": 1.0}, {"name": "val_loss", "value": value}]
            made = tmp_path / f"{arm}-{seed}"
            made.mkdir()
            (made / "hone.json").write_text(json.dumps({"figures": figures}))
    return tmp_path


def test_the_interval_is_that_of_welchs_test(folder: Path) -> None:
    found = row(folder, "val_loss", "train-random", "train-staged")
    base, arm = ARMS["train-random"], ARMS["train-staged"]
    interval = ttest_ind(arm, base, equal_var=False).confidence_interval()
    assert found["n"] == 3 and found["peer_value"] == pytest.approx(sum(base) / 3)
    assert found["difference"] - found["interval"] == pytest.approx(interval.low)
    assert found["difference"] + found["interval"] == pytest.approx(interval.high)


def test_an_arm_without_the_figure_is_said(folder: Path) -> None:
    with pytest.raises(SystemExit, match="train-warmup-N"):
        row(folder, "val_loss", "train-random", "train-warmup")
