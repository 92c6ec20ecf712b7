"""The comparisons of experts, with their dense twin and with fewer of them: what the arms are, and what pages and rows say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import expert_merging, moe_twin
from tests.train.conftest import write_data


def test_twins_compute_alike_and_the_page_has_all_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    moe_twin.main(
        [f"--data={data}", f"--out={out}", "--small", "--seeds=2", "--steps=6", "--device=cpu", "--text=words"]
    )
    result = json.loads((out / "result.json").read_text(encoding="utf8"))
    dense, experts = result["models"]["dense"], result["models"]["moe"]
    # Routers are what experts compute more; their weights are those of the feed-forwards four times.
    routers = 2 * 8 * 32
    assert experts["flops_a_token"] - dense["flops_a_token"] == 6 * routers
    assert experts["active"] == dense["params"] + routers
    assert experts["params"] == dense["params"] + routers + 2 * 3 * (3 * 32 * 64)
    runs = {(run["arm"], run["seed"]): run for run in result["runs"]}
    assert len(runs) == 8 and all(math.isfinite(run["val_loss"]) for run in runs.values())
    for seed in range(2):
        half, upcycled = runs["dense", seed]["val_loss_at_half"], runs["upcycled", seed]
        assert upcycled["val_loss_at_start"] == pytest.approx(half, abs=1e-5) and upcycled["steps"] == 3
        assert abs(runs["upcycled, half drawn anew", seed]["val_loss_at_start"] - half) > 1e-4
        assert all(runs[arm, seed]["expert_load"] >= 1 for arm in ("moe", "upcycled"))
    table = moe_twin.table(result)
    assert table.count("\n") == 5 and "0.0%" not in table
    page = tmp_path / "moe.md"
    page.write_text(f"before\n{moe_twin.BEGIN}old\n{moe_twin.END}\nafter\n", encoding="utf8")
    monkeypatch.setattr(moe_twin, "PAGE", page)
    moe_twin.write_page(out / "result.json", keep=False)
    text = page.read_text(encoding="utf8")
    assert table in text and "old" not in text and text.startswith("before\n") and text.endswith("\nafter\n")
    rows = moe_twin.rows(result)
    assert [row.get("technique") for row in rows] == [
        "feed-forward/moe",
        "growth/upcycle",
        "growth/upcycle",
        None,
        None,
    ]
    first = rows[0]
    assert first["ratio"] == pytest.approx(first["value"] / first["peer_value"])
    assert first["difference"] == pytest.approx(first["value"] - first["peer_value"])


@pytest.mark.slow
def test_experts_are_removed_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    shorter = dict(list(expert_merging.ARMS.items())[:3])
    monkeypatch.setattr(expert_merging, "ARMS", shorter)
    expert_merging.main(
        [f"--data={data}", f"--out={out}", "--small", "--steps=6", "--device=cpu", "--calibration-sequences=4"]
    )
    result = json.loads((out / "merging.json").read_text(encoding="utf8"))
    assert {run["arm"] for run in result["runs"]} == {"dense", "moe", "upcycled"}
    found = result["merging"]
    assert all(len(found[model]["arms"]) == 2 * len(shorter) for model in expert_merging.MODELS)
    assert all(math.isfinite(loss) for model in found.values() for loss in model["arms"].values())
    page = tmp_path / "page.md"
    page.write_text(f"before\n{expert_merging.BEGIN}{expert_merging.END}\nafter\n", encoding="utf8")
    monkeypatch.setattr(expert_merging, "PAGE", page)
    expert_merging.write_page(out / "merging.json", keep=False)
    text = page.read_text(encoding="utf8")
    assert all(f"| {arm} |" in text for arm in shorter) and text.endswith("\nafter\n")
    rows = expert_merging.rows(result)
    assert len(rows) == 2 * 2 * len(shorter) and sum("peer" in row for row in rows) == 2 * 2 * (len(shorter) - 1)
    assert {row["technique"] for row in rows if "technique" in row} == {
        "structured pruner/experts", "structured pruner/expert_merging"
    }  # fmt: skip
