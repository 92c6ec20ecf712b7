"""Pareto lines, one-change pairs, findings: what the page concludes from the figures."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hone.report import compare
from hone.report.collect import collect
from hone.report.findings import findings

NUMBERS = st.floats(0.01, 1e9, allow_nan=False)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=30))
def test_pareto_is_exactly_the_unbeaten_points(points: list[tuple[float, float]]) -> None:
    front = compare.pareto(points)

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    unbeaten = {point for point in points if not any(beats(other, point) for other in points)}
    assert {points[index] for index in front} == unbeaten
    assert len(front) == len(unbeaten), "equal points are taken once"
    sizes = [points[index] for index in front]
    assert sizes == sorted(sizes) and [y for _, y in sizes] == sorted((y for _, y in sizes), reverse=True)


def test_points_of_a_whole_line(whole: Path) -> None:
    points, left_out = compare.quality_points(collect(whole))
    assert not left_out and {point.label for point in points} == {"base", "draft", "int8", "int4", "int4-rtn", "pruned"}
    assert {point.label for point in points if point.on_line} == {"base", "int8", "int4"}


def test_other_windows_are_not_compared(copy) -> None:
    folder = copy()
    path = folder / "eval-int4" / "hone.json"
    path.write_text(path.read_text().replace("window 256, stride 128", "window 32, stride 32"))
    points, left_out = compare.quality_points(collect(folder))
    assert [row.id for row in left_out] == ["eval-int4"] and "int4" not in {point.label for point in points}


def test_serving_pairs_differ_in_one_thing(whole: Path) -> None:
    pairs = {pair.other.name: pair for pair in compare.serving_pairs(collect(whole))}
    assert {pair.base.name for pair in pairs.values()} == {"plain"}
    assert set(pairs) == {"int4", "speculative", "static", "no-prefix"}
    assert (pairs["static"].path, pairs["static"].before, pairs["static"].after) == (
        "engine.batching",
        "continuous",
        "static",
    )
    assert pairs["static"].ratio == 610 / 1480 and pairs["int4"].path == "model"


def test_runs_with_two_changes_are_no_pair(copy) -> None:
    folder = copy()
    path = folder / "serve-static" / "hone.json"
    manifest = json.loads(path.read_text())
    manifest["spec"]["engine"]["prefix_cache"] = False
    path.write_text(json.dumps(manifest))
    pairs = compare.serving_pairs(collect(folder))
    assert "static" not in {pair.other.name for pair in pairs if pair.base.name == "plain"}


def test_differences() -> None:
    one = {"a": 1, "b": {"c": 2, "d": None}, "e": [1]}
    other = {"a": 1, "b": {"c": 3, "d": {"kind": "x", "n": 4}}, "f": 0}
    found = {path: (before, after) for path, before, after in compare.differences(one, other)}
    assert found == {"b.c": (2, 3), "b.d": (None, {"kind": "x", "n": 4}), "e": ([1], None), "f": (None, 0)}


def test_findings_say_what_the_figures_say(whole: Path) -> None:
    found = {finding.about: finding for finding in findings(collect(whole))}
    assert found["quality"].value == "5.80x smaller"
    assert found["quality"].text == "int4 (gptq 4-bit) against base, for +0.92 % perplexity"
    assert found["serving"].value == "2.43x tokens/s"
    assert found["data"].value == f"{100 * 30_658_000 / 41_300_000:.3g} %" and "'near'" in found["data"].text
    assert len(found) == 4


def test_a_costly_variant_is_not_praised_over_a_good_one(copy) -> None:
    folder = copy()
    path = folder / "eval-int4" / "hone.json"
    manifest = json.loads(path.read_text())
    for figure in manifest["figures"]:
        if figure["name"] == "perplexity":
            figure["value"] = 80.0
    path.write_text(json.dumps(manifest))
    finding = next(finding for finding in findings(collect(folder)) if finding.about == "quality")
    assert finding.text.startswith("int4-rtn") and "+3.5 %" in finding.text


def test_bounds_have_no_error(copy) -> None:
    folder = copy()
    path = folder / "train-base" / "hone.json"
    manifest = json.loads(path.read_text())
    for figure in manifest["figures"]:
        if figure["name"] == "time_s":
            figure["estimate"]["bound"] = True
    path.write_text(json.dumps(manifest))
    check = next(c for c in compare.checks(collect(folder)) if c.row.id == "train-base" and c.figure.name == "time_s")
    assert check.bound and compare.error_words(check) == "limit"
