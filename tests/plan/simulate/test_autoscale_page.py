"""The page of autoscalers: means, intervals and seeds of its tables, a picture that is XML, and rows for the ledger."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks import autoscale_page
from benchmarks.autoscale import policies
from hone.report.page import standalone
from hone.serve import AUTOSCALERS


def run(policy: str, seed: int, hours: float, met: float) -> dict:
    moments = [] if policy.startswith("fixed") else [[60.0 * at, 2 + at % 3, 2] for at in range(5)]
    return {
        "trace": "day.csv", "policy": policy, "seed": seed, "share": 0.5, "requests": 1000, "rate": 0.5, "rates": [0.2, 0.9, 0.4, 0.3, 0.2],
        "burstiness": 3.0, "rate_per_replica": 0.25, "begin": 2, "attainment": met, "goodput": met / 2, "gpu_hours": hours, "cold_starts": 3,
        "most": 4, "queue_p99_s": 12.0, "ttft_p99_s": 13.0, "met_per_gpu_hour": 1000 * met / hours, "moments": moments,
    }  # fmt: skip


def kept(folder, seeds: int = 3, missing: int = 0):
    path = folder / "kept.jsonl"
    rows = [run("fixed, for the mean", seed, 2.0, 0.5) for seed in range(seeds)]
    rows += [run("hysteresis", seed, 3.0 + seed, 0.7 + 0.1 * seed) for seed in range(seeds - missing)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return path


def test_means_with_their_interval(tmp_path):
    runs = autoscale_page.read([kept(tmp_path)])
    text = autoscale_page.tables(runs)
    assert "3 seeds, mean and 95 % interval" in text and "50% of its requests" in text
    # 3, 4, 5 hours: 4 +- 4.303 x 1 / sqrt(3)
    assert "| 4.00 (1.52 to 6.48) |" in text and "| fixed, for the mean (2) | 50.0 % |" in text
    assert "80.0 % (55.2 to 100.0)" in text
    rows = {row["figure"]: row for row in autoscale_page.ledger_rows(runs)}
    row = rows["day.csv: hysteresis: gpu_hours"]
    assert (
        row["value"] == 4.0 and row["interval"] == pytest.approx([1.516, 6.484], abs=1e-3) and row["how"] == "modelled"
    )
    drawn = standalone(autoscale_page.picture(runs))
    assert "hysteresis: 80.0% in time" in drawn and ElementTree.fromstring(drawn).tag.endswith("svg")


def test_only_seeds_of_all_policies_count(tmp_path):
    runs = autoscale_page.read([kept(tmp_path, seeds=3, missing=2)])
    assert "(one seed)" in autoscale_page.tables(runs)
    path = tmp_path / "apart.jsonl"
    path.write_text("\n".join(json.dumps(run(name, seed, 1.0, 0.5)) for seed, name in enumerate(AUTOSCALERS)))
    with pytest.raises(SystemExit, match="no seed of day"):
        autoscale_page.read([path])


def test_every_policy_of_the_slot_is_compared():
    named = policies(0.5)
    assert {*named} == {*AUTOSCALERS}
    for name, fields in named.items():
        assert AUTOSCALERS.read({"kind": name, **fields})
