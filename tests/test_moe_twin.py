"""The comparison of experts with their dense twin: what its arms are, and what its page and its rows say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import moe_twin
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
