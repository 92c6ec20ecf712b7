"""The page as a page: themes, contrast, charts for two widths, text side by side."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hone.base.interval import half_width
from hone.report import bars, charts, compare, markdown, page
from hone.report.collect import collect
from hone.report.sections.data import data_set
from hone.report.sections.estimates import Estimates
from hone.report.sections.samples import sayings
from tests.report.markup import Walk


def colors(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))


def luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


THEMES = re.findall(r"\{([^{}]*--paper:[^{}]*)\}", page.stylesheet())


@pytest.mark.parametrize("block", THEMES)
def test_contrast_of_both_themes(block: str) -> None:
    theme = colors(block)
    for ground in ("paper", "surface", "sunk"):
        for ink in ("ink", "soft", "muted", "steel", "ember"):
            assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
        for shape in ("edge", "slate"):
            assert contrast(theme[shape], theme[ground]) >= 3, (shape, ground)
    assert contrast(theme["ink"], theme["mark"]) >= 4.5 and contrast(theme["muted"], theme["band"]) >= 4.4


def test_system_theme_toggle_and_print_have_all_colors() -> None:
    names = [set(colors(block)) for block in THEMES]
    assert len(names) == 4 and all(one == names[0] for one in names), "light, system dark, chosen dark, print"


def test_every_class_of_a_chart_has_a_style(whole: Path) -> None:
    text = page.render(collect(whole))
    used = {
        name
        for drawn in re.findall(r"<svg.*?</svg>", text, re.DOTALL)
        for names in re.findall(r'class="([^"]*)"', drawn)
        for name in names.split()
    }
    styled = set(re.findall(r"\.([a-z]+)", page.stylesheet()))
    assert used and used <= styled


def test_charts_come_in_two_widths_and_are_named(whole: Path) -> None:
    walk = Walk(page.render(collect(whole)))
    assert walk.attributes.count(("class", "wide")) == walk.attributes.count(("class", "narrow")) > 8
    labels = [value for name, value in walk.attributes if name == "aria-label"]
    assert "Loss of train-base over 400 steps, validation loss from 5.02 to 3.20 nats per token" in labels or any(
        label.startswith("Loss of train-base over 400 steps") for label in labels
    )
    widths = [float(value.split()[2]) for name, value in walk.attributes if name == "viewbox"]
    assert all(width <= 1144 for width in widths) and min(widths) >= 50


def test_a_missing_value_has_no_bar(whole: Path) -> None:
    text = page.render(collect(whole))
    assert ">None<" not in text and "nan" not in Walk(text).text.split()


def test_texts_stand_together_when_equal(whole: Path) -> None:
    saying = sayings(collect(whole))[0]
    assert [text.runs for text in saying.texts] == ["plain, speculative, static, no-prefix", "int4"]
    first, second = saying.texts
    assert first.other == "" and second.same == "with open(path" and second.other.startswith(", 'rb')")


def test_reasons_join_counts_and_samples(whole: Path) -> None:
    line = collect(whole)
    reasons = {reason.name: reason for reason in data_set(line.rows[0]).reasons}
    assert reasons["rules: too few words"].words == "1,204 documents, 303 KiB"
    assert len(reasons["near: near copy (Jaccard >= 0.8)"].samples) == 2


def test_rules_that_met_documents_are_shown_the_largest_first(whole: Path) -> None:
    line = collect(whole)
    rules = data_set(line.rows[0]).rules
    assert [(name, reason, *sizes) for name, reason, _, *sizes in rules.rows] == [
        ("rules", "repeated lines", "1.43 MiB", "nothing"),
        ("rules", "too few words", "312 KiB", "293 KiB"),
    ]
    assert rules.idle == 1


def test_a_dot_has_the_color_of_the_band_that_it_lies_in(whole: Path) -> None:
    checks = compare.checks(collect(whole))
    for drawn in (bars.ratios(checks, 500, "all", mixed=True), bars.ratio_dots([("time_s", checks)], 500, "all")):
        band = re.search(r'<rect x="([^"]+)" y="[^"]+" width="([^"]+)" [^>]*class="band"', drawn)
        assert band is not None
        low, high = float(band.group(1)), float(band.group(1)) + float(band.group(2))
        dots = re.findall(r'<circle cx="([^"]+)"[^>]*class="point (right|wrong)"', drawn)
        assert {kind for _, kind in dots} == {"right", "wrong"}
        assert all((low - 0.1 <= float(x) <= high + 0.1) == (kind == "right") for x, kind in dots)


def test_the_interval_of_a_rate_ends_at_zero() -> None:
    """Of 100, 300 and 800 the interval of the mean begins at -496."""
    drawn = bars.means([("plain", (100.0, 300.0, 800.0), half_width((100.0, 300.0, 800.0)))], 500, ["400"], "rates")
    axis = min(float(x) for x in re.findall(r'<text x="([^"]+)"[^>]*class="tick"', drawn))
    start = re.search(r'<line x1="([^"]+)"[^>]*class="range"', drawn)
    assert start is not None and float(start.group(1)) == axis
    rows = [("change", (-1.0, 0.5, 1.0), 2.6), ("other", (-1.0, 0.5, 1.5), 2.6)]
    below = bars.means(rows, 700, ["0.2", "0.3"], "differences")
    assert re.search(r'class="tick"[^>]*>-2<', below), "other values may be below 0"


def test_a_students_loss_is_on_an_axis_of_its_own(whole: Path) -> None:
    """Its distance from its teacher is no next-token loss."""
    line = collect(whole)
    student, base = line.get("train-draft"), line.get("train-base")
    assert student is not None and base is not None
    student.content["steps.jsonl"] = [{"step": 1, "loss": 0.7}, {"step": 2, "loss": 0.6}, {"step": 2, "val_loss": 6.5}]
    drawn = charts.loss(student, 500, charts.loss_domain([student], val_alone=True), apart=True)
    assert "teacher&#39;s loss, training 0.650" in drawn and "validation 6.50" in drawn
    places = [float(y) for y in re.findall(r'd="M[^ ]+ ([^L"]+)[^>]*class="(?:raw|curve)"', drawn)]
    dot = re.search(r'<circle [^>]*cy="([^"]+)"[^>]*class="valdot"', drawn)
    assert dot is not None and float(dot.group(1)) < min(places), "below the validation loss"
    assert drawn.count('class="grid"') > 5
    assert "teacher" not in charts.loss(base, 500, charts.loss_domain([base]))


def test_the_load_of_experts_is_a_map_of_layers(whole: Path) -> None:
    line = collect(whole)
    base = line.get("train-base")
    assert base is not None and not charts.expert_loads(base) and 'id="experts"' not in page.render(line)
    logged = [{"step": step, "loss": 1.0, "expert_loads": {"0": [6, 2, 2, 2], "3": [1, 1, 1, 1]}} for step in range(4)]
    figures = {"expert_load": 2.0, "expert_drops": 0.125, "router_entropy": 1.1}
    broken = [{"step": 5, "expert_loads": "none"}, {"step": 6, "loss": 1.0, **figures}]
    base.content["steps.jsonl"] = [*logged, *broken]
    assert charts.expert_loads(base) == {"0": [6.0, 2.0, 2.0, 2.0], "3": [1.0] * 4}
    drawn = page.render(line)
    assert 'id="experts"' in drawn and "layer 0, expert 0: 2.00 x the mean" in drawn and 'class="heat more"' in drawn
    assert "12.5% of visits dropped, entropy of the router 1.10 nats" in drawn
    told = markdown.render(line)
    assert "## Experts of train-base" in told and "| 0 | 4 | 2.00 x | 0.67 x |" in told


def test_long_tables_are_folded_on_a_phone(whole: Path) -> None:
    """The script opens them where the screen is wide; the anchors of artifacts open what they lie in."""
    walk = Walk(page.render(collect(whole)))
    assert walk.attributes.count(("class", "fold")) >= 2
    script = "".join(walk.scripts)
    assert 'matchMedia("(min-width: 761px)")' in script and 'here.tagName === "DETAILS"' in script


def test_estimates_start_with_time_and_memory(whole: Path) -> None:
    found = Estimates.of(collect(whole))
    assert found is not None
    assert [title for title, *_ in found.charts][:3] == ["Time", "Tokens per second", "Peak memory"]
    assert found.sure == "model size"
