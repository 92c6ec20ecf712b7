"""Scales, ticks, labels, layout: what the charts are drawn with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.report.chain import layout
from hone.report.collect import collect
from hone.report.svg import Scale, el, fit, overlap, padded_domain, place_labels, text_width
from tests.report.lines import LineMaker


@given(
    st.floats(1e-6, 1e9),
    st.floats(1.001, 1e6),
    st.booleans(),
    st.sampled_from(["", "B", "s"]),
)
def test_ticks_are_round_few_and_inside(low: float, span: float, log: bool, unit: str) -> None:
    scale = Scale(low, low * span, 0.0, 100.0, log)
    ticks = scale.ticks(5, unit)
    assert 1 <= len(ticks) <= 9 or (log and len(ticks) <= 9)
    assert all(low * (1 - 1e-6) <= tick <= low * span * (1 + 1e-6) for tick in ticks)
    assert ticks == sorted(set(ticks))
    assert math.isclose(scale(low), 0, abs_tol=1e-6) and math.isclose(scale(low * span), 100, abs_tol=1e-6)


def test_byte_ticks_are_binary() -> None:
    assert Scale(1.2e6, 9e6, 0, 1, True).ticks(5, "B") == [2.0**21, 2.0**22, 2.0**23]
    assert Scale(0, 5e6, 0, 1).ticks(5, "B") == [index * 2.0**20 for index in range(5)]


@given(st.lists(st.tuples(st.floats(60, 640), st.floats(40, 300)), min_size=1, max_size=7, unique=True))
def test_labels_overlap_nothing_when_there_is_room(anchors: list[tuple[float, float]]) -> None:
    crowded = any(math.dist(one, other) < 60 for n, one in enumerate(anchors) for other in anchors[:n])
    if crowded:
        return
    labels = [f"variant-{index}" for index in range(len(anchors))]
    boxes = place_labels(anchors, labels, (0, 0, 760, 340))
    for n, box in enumerate(boxes):
        assert box[0] >= 0 and box[2] <= 760 and box[1] >= 0 and box[3] <= 340
        assert not any(overlap(box, other) for other in boxes[:n])
        assert not any(overlap(box, (x - 5, y - 5, x + 5, y + 5)) for x, y in anchors)


@pytest.mark.parametrize("gap", [0.0, 0.5, 3.0, 9.0])
def test_labels_of_close_points_stay_apart(gap: float) -> None:
    anchors = [(100.0, 100.0), (100.0 + gap, 100.0 + gap), (100.0, 100.0 - gap)]
    boxes = place_labels(anchors, ["int4", "int4-rtn", "int4-awq"], (0, 0, 400, 300))
    assert not any(overlap(one, other) for n, one in enumerate(boxes) for other in boxes[:n])


def test_elements_escape() -> None:
    assert el("text", "<b>&\"'", class_='a"b') == '<text class="a&#34;b">&lt;b&gt;&amp;&#34;&#39;</text>'


@given(st.text(max_size=60), st.floats(20, 300))
def test_fit_fits(words: str, width: float) -> None:
    cut = fit(words, width)
    assert cut == words or text_width(cut) <= max(width, text_width("…"))


def test_domain_of_one_value_has_room() -> None:
    for log in (False, True):
        low, high = padded_domain([5.0], log=log)
        assert low < 5 < high


def test_nearly_equal_values_are_not_blown_up() -> None:
    low, high = padded_domain([2194.95, 2195.0], log=False, least=0.02)
    assert low < 2194.95 and high > 2195.0 and (high - low) / high > 0.02


def test_layout_puts_every_node_in_its_own_place(whole: Path) -> None:
    nodes = {node.id: node for node in layout(collect(whole))}
    assert nodes["data-corpus"].depth == 0 and nodes["train-base"].depth == 1
    assert nodes["train-draft"].main == "train-base", "the teacher's path implies the data"
    assert nodes["serve-speculative"].main == "train-base"
    assert nodes["serve-speculative"].others == [("train-draft", "draft")]
    assert {node.depth for node in nodes.values() if node.kind in ("eval", "serve")} == {3}
    for one in nodes.values():
        for other in nodes.values():
            same = one is not other and one.depth == other.depth
            assert not same or abs(one.y - other.y) >= (one.height + other.height) / 2


def test_lines_cross_no_box(whole: Path) -> None:
    nodes = {node.id: node for node in layout(collect(whole))}
    for node in nodes.values():
        if node.main is None:
            continue
        between = range(nodes[node.main].depth + 1, node.depth)
        for other in nodes.values():
            assert other.depth not in between or abs(other.y - node.y) > other.height / 2, (node.id, other.id)


def test_circles_and_foreign_parents_are_laid_out(tmp_path: Path) -> None:
    line = LineMaker(tmp_path / "odd")
    line.data()
    line.train("base", floor=3.0, params=1000, time_s=1.0, data="data-corpus")
    manifest = tmp_path / "odd" / "data-corpus" / "hone.json"
    base = collect(line.folder).get("train-base")
    assert base is not None
    circle = f'"parents": [{{"role": "seed", "name": "train-base", "fingerprint": "{base.fingerprint}"}}]'
    manifest.write_text(manifest.read_text().replace('"parents": []', circle))
    nodes = layout(collect(line.folder))
    assert len(nodes) == 2 and all(math.isfinite(node.y) for node in nodes)
