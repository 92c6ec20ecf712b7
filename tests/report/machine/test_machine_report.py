"""The report of a machine: a whole one, a bare one, damage; its figures, its roofline by hand, its text as text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hone.base.errors import ArtifactError
from hone.measure.probe.result import MachineProbe, keep_probe
from hone.report import page as pages
from hone.report.machine.parts import flat, rate_words, spell
from hone.report.machine.reading import VERSION, read, value
from hone.report.machine.roofline import Roof, points, roofs
from hone.report.machine.write import build
from tests.report.machine.machines import calibration, probe, topology, write
from tests.report.markup import Walk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_the_version_is_that_of_the_probe() -> None:
    """The report's room may not import the probe's."""
    assert MachineProbe.model_fields["version"].default == VERSION


def test_a_whole_machine(folder: Path) -> None:
    text = build(folder).read_text(encoding="utf8")
    walk = Walk(text)
    assert len(walk.ids) == len(set(walk.ids))
    assert {"levels", "threads", "nodes", "gpus", "peers", "roofline", "machine", "notes"} <= set(walk.ids)
    assert all(one.startswith("#") or one in ("probe.json", "report.md") for one in walk.addresses), "nothing is loaded"
    for said in (
        "Example <CPU> 9000",
        "shared <by> 8",
        "the disk <is> shared",
        "other <work> ran",
        "L3",
        "98.0 ns",
        "300 GB/s",
    ):
        assert said in walk.text, said
    assert "Through the host: GPU 1 to GPU 0" in walk.text and "memory of node 2" in walk.text
    assert "a limit of 12 processors' time" in walk.text and "a limit of 400 GiB of memory" in walk.text
    assert "None" not in walk.text and "nan" not in walk.text.lower().split()


def test_every_class_of_its_charts_has_a_style(folder: Path) -> None:
    text, css = build(folder).read_text(encoding="utf8"), pages.stylesheet()
    drawn = "".join(re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL))
    used = {name for names in re.findall(r'class="([^"]*)"', drawn) for name in names.split()}
    assert used and all(f".{name}" in css for name in used), {name for name in used if f".{name}" not in css}


def test_charts_for_two_widths_stay_inside(folder: Path) -> None:
    text = build(folder).read_text(encoding="utf8")
    assert text.count('<div class="wide">') == text.count('<div class="narrow">') == 5
    for width, drawn in re.findall(r'<svg viewBox="0 0 (\d+) \d+"(.*?)</svg>', text, re.DOTALL):
        for x in re.findall(r'\b(?:cx|x1|x2|x)="(-?[\d.]+)"', drawn):
            assert -1 <= float(x) <= int(width) + 1, (width, x)


def test_markdown_has_the_same_tables(folder: Path) -> None:
    build(folder)
    text = (folder / "report.md").read_text(encoding="utf8")
    assert text.startswith("# Example &lt;CPU&gt; 9000\n") and "| memory | 98.0 ns | 300 GB/s | 1.00 TiB |" in text
    assert "| node 0 | 150 GB/s | 60.0 GB/s | 60.0 GB/s |" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1


def test_the_same_files_give_the_same_bytes(folder: Path) -> None:
    first = build(folder).read_bytes()
    assert build(folder).read_bytes() == first


def test_a_bare_machine_has_a_report(tmp_path: Path) -> None:
    bare = MachineProbe(made_at="2026-01-01T00:00:00+00:00", seconds=1, quick=True, processor="x", topology=topology())
    keep_probe(bare, tmp_path / "probe.json")
    walk = Walk(build(tmp_path).read_text(encoding="utf8"))
    assert "roofline" not in walk.ids and "gpus" not in walk.ids and "machine" in walk.ids and "quick" in walk.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no mapping"),
        ('{"version": 0}', "has version 0"),
        ('{"version": 1}', "has no processor"),
    ],
)
def test_damage_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "probe.json").write_text(text)
    with pytest.raises(ArtifactError, match=said) as caught:
        build(tmp_path)
    assert "hone calibrate --report" in caught.value.fix
    with pytest.raises(ArtifactError, match="cannot be read"):
        read(tmp_path / "nowhere")


def test_the_roofline_by_hand() -> None:
    found = json.loads(calibration().model_dump_json())
    low, high = roofs(found)
    assert (low.dtype, high.dtype) == ("float32", "bfloat16") and high.ridge == pytest.approx(7e14 / 3e12)
    assert Roof("x", 100.0, 10.0).at(2) == 20 and Roof("x", 100.0, 10.0).at(50) == 100
    by_name = {(one.dtype, one.name): one for one in points(found)}
    one = by_name["bfloat16", "linear 1 x 4096 x 4096"]
    # 2 n k FLOPs over 2 (k + n k + n) bytes: a little less than one FLOP a byte.
    assert one.intensity == pytest.approx(2 * 4096**2 / (2 * (4096**2 + 2 * 4096))) and one.intensity < 1
    assert one.share == pytest.approx(2.4e12 / (one.intensity * 3e12))
    attention = by_name["bfloat16", "attention over 4,096 tokens"]
    head = 128
    assert attention.intensity == pytest.approx(2 * 4096**2 * head / (4 * 4096 * head * 2))
    assert attention.share == pytest.approx(5e14 / 7e14)


def test_what_was_not_measured_is_not_a_number() -> None:
    assert value(None) is None and value({"value": None}) is None and value({"value": float("nan")}) is None
    assert value({"value": 0}) is None, "no time and no rate is 0"
    assert (
        rate_words(None) == "not measured"
        and rate_words(11.6e9) == "11.6 GB/s"
        and flat(3e14, "FLOP/s") == "300 TFLOP/s"
    )


def test_ranges() -> None:
    assert spell([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and spell([]) == ""


def test_a_probe_fits_its_schema() -> None:
    assert MachineProbe.model_validate_json(probe().model_dump_json()) == probe()
