"""What the three files of a report hold, from whole lines and from broken ones."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.durable import write_jsonl
from hone.base.errors import ArtifactError
from hone.report import build, picture
from hone.report.collect import collect
from tests.report.lines import HOSTILE, LineMaker
from tests.report.markup import Walk


def read(folder: Path, out: Path) -> tuple[Walk, str, dict]:
    """(page, markdown, rows) of a line's report."""
    index = build(folder, out)
    assert index == out / "index.html"
    rows = json.loads((out / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return Walk(index.read_text()), (out / "report.md").read_text(), rows


def ids(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/hone.json"))


def test_every_artifact_and_every_figure_appears(whole: Path, tmp_path: Path) -> None:
    page, markdown, rows = read(whole, tmp_path)
    assert [row["id"] for row in rows["artifacts"]] == sorted(
        ids(whole), key=[row["id"] for row in rows["artifacts"]].index
    )
    assert {row["id"] for row in rows["artifacts"]} == set(ids(whole))
    assert rows["schema"] == 1 and rows["problems"] == []
    for row in rows["artifacts"]:
        artifact = Artifact.read(whole / row["id"])
        assert row["id"] in page.text and f"`{row['id']}`" in markdown
        assert {figure["name"] for figure in row["figures"]} == set(artifact.figures)
        for figure in row["figures"]:
            original = artifact.figures[figure["name"]]
            assert figure["value"] == original.value and figure["error"] == original.error
        command = " ".join(artifact.manifest["provenance"]["command"].split())
        assert command in page.text and command in markdown


def test_every_estimate_is_shown_exactly(whole: Path, tmp_path: Path) -> None:
    page, markdown, _ = read(whole, tmp_path)
    titles = [value for name, value in page.attributes if name == "title"]
    for id in ids(whole):
        for figure in Artifact.read(whole / id).figures.values():
            if figure.estimate is not None:
                value = figure.estimate.value
                words = f"{value:,.0f}" if float(value).is_integer() else repr(value)
                assert titles.count(f"{words} {figure.estimate.unit}") >= 2, (id, figure.name)
                assert any(line.startswith(f"| `{id}` |") and "x |" in line for line in markdown.splitlines())


def test_page_stands_alone(hostile: Path, tmp_path: Path) -> None:
    page, _, _ = read(hostile, tmp_path)
    assert page.addresses and all(address.startswith(("#", "report.")) for address in page.addresses)
    anchors = [address[1:] for address in page.addresses if address.startswith("#")]
    assert set(anchors) <= set(page.ids) and len(page.ids) == len(set(page.ids))
    for script in page.scripts:
        assert not re.search(r"https?://|url\((?!#)|@import|fetch\(|XMLHttp", script)
    assert page.tags.count("h1") == 1 and page.tags.count("script") == 1
    assert not {"link", "img", "iframe", "object"} & set(page.tags)


def test_hostile_text_stays_text(hostile: Path, tmp_path: Path) -> None:
    page, markdown, rows = read(hostile, tmp_path)
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert " ".join(HOSTILE.split()) in page.text
    assert HOSTILE in rows["artifacts"][0]["provenance"]["command"]
    outside_code = re.sub(r"(`+).*?\1", "", markdown)
    assert "<" not in outside_code.replace("&lt;", "")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    line = LineMaker(tmp_path / "a & <b>line")
    line.data("x'\"><script>alert(1)<!--")
    page, markdown, rows = read(line.folder, tmp_path / "out")
    assert rows["line"] == "a & <b>line" and "a & <b>line" in page.text
    assert page.tags.count("script") == 1
    assert page.texts.count("a & <b>line") == 1 and "<b>line" not in re.sub(r"(`+).*?\1", "", markdown)
    assert "data-x'\"><script>alert(1)<!--" in page.text


def test_same_artifacts_same_bytes(whole: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(whole, tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["index.html", "report.json", "report.md"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_default_place_and_building_again(copy) -> None:
    folder = copy("data-corpus", "train-base")
    first = build(folder)
    assert first == folder / "report" / "index.html"
    before = first.read_bytes()
    assert build(folder).read_bytes() == before, "the report must not read itself"


@pytest.mark.parametrize(
    "kept",
    [
        ("data-corpus",),
        ("train-base",),
        ("compress-int4",),
        ("eval-int4",),
        ("serve-speculative",),
        ("data-corpus", "train-base", "eval-base"),
        ("compress-int4", "eval-int4", "serve-int4", "serve-plain"),
    ],
)
def test_partial_lines_render(copy, tmp_path: Path, kept: tuple[str, ...]) -> None:
    folder = copy(*kept)
    page, _, rows = read(folder, tmp_path / "out")
    assert {row["id"] for row in rows["artifacts"]} == set(kept)
    assert {"chain", "repeat", "artifacts", "machine"} <= set(page.ids)
    for row in rows["artifacts"]:
        for parent in row["parents"]:
            assert parent["id"] == (parent["name"] if parent["name"] in kept else f"foreign:{parent['name']}")
            assert parent["name"] in page.text
    picture(folder, tmp_path / "picture.svg")


def test_artifact_without_figures_or_side_files(copy, tmp_path: Path) -> None:
    folder = copy()
    for path in folder.glob("*/hone.json"):
        manifest = json.loads(path.read_text())
        manifest["figures"], manifest["machine"], manifest["provenance"] = [], {}, {}
        path.write_text(json.dumps(manifest))
        for side in [*path.parent.glob("*.jsonl"), *path.parent.glob("stats.json")]:
            side.unlink()
    page, _, rows = read(folder, tmp_path / "out")
    assert rows["findings"] == [] and len(rows["artifacts"]) == len(ids(folder))
    assert not {"loss", "quality", "estimates", "text"} & set(page.ids)
    assert "its manifest names no command" in page.text and "not described" in page.text


def test_broken_pieces_are_named_and_the_rest_is_shown(copy, tmp_path: Path) -> None:
    folder = copy()
    (folder / "train-draft" / "hone.json").write_text('{"format": 1, "kind": ')
    (folder / "eval-int8" / "hone.json").write_text('{"format": 1, "kind": "eval"}')
    (folder / "eval-pruned" / "hone.json").write_text('{"format": 9}')
    (folder / "train-base" / "steps.jsonl").write_text('{"step": 0, "loss": 9.1}\nnot json\n')
    (folder / "data-corpus" / "stats.json").write_text("[1, 2]")
    (folder / "compress-new.partial").mkdir()
    page, markdown, rows = read(folder, tmp_path / "out")
    named = {problem["name"] for problem in rows["problems"]}
    assert named >= {
        "train-draft",
        "eval-int8",
        "eval-pruned",
        "train-base/steps.jsonl",
        "data-corpus/stats.json",
        "compress-new",
    }
    for name in named:
        assert name in page.text and f"`{name}`" in markdown
    assert {row["id"] for row in rows["artifacts"]} == set(ids(folder)) - {"train-draft", "eval-int8", "eval-pruned"}


def test_numbers_that_are_none(copy, tmp_path: Path) -> None:
    folder = copy()
    path = folder / "train-base" / "hone.json"
    manifest = json.loads(path.read_text())
    for figure in manifest["figures"]:
        if figure["name"] == "val_loss":
            figure["value"] = float("nan")
        if figure["name"] == "time_s":
            figure["estimate"]["value"] = float("inf")
    path.write_text(json.dumps(manifest))
    steps = folder / "train-base" / "steps.jsonl"
    steps.write_text(
        steps.read_text() + '{"step": 401, "loss": NaN}\n{"step": 402, "val_loss": Infinity}\n{"step": "x"}\n'
    )
    page, _, rows = read(folder, tmp_path / "out")
    figures = {
        figure["name"]: figure for row in rows["artifacts"] if row["id"] == "train-base" for figure in row["figures"]
    }
    assert figures["val_loss"]["value"] == "nan" and figures["time_s"]["estimate"]["value"] == "inf"
    assert "not a number" in page.text
    assert not [
        value
        for name, value in page.attributes
        if name in ("x", "y", "d", "cx", "cy", "width") and ("nan" in value or "inf" in value)
    ]


def test_a_parent_made_again_is_said(copy, tmp_path: Path) -> None:
    folder = copy()
    path = folder / "train-base" / "hone.json"
    path.write_text(path.read_text().replace(Artifact.read(folder / "train-base").fingerprint, "0123456789abcdef"))
    page, _, rows = read(folder, tmp_path / "out")
    stale = {problem["name"] for problem in rows["problems"] if "an earlier train-base" in problem["what"]}
    assert stale >= {"train-draft", "compress-int4", "eval-base", "serve-plain"}
    assert "an earlier one" in page.text


def test_nothing_to_report(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ArtifactError, match="no folder") as missing:
        build(tmp_path / "tinny")
    assert "check the path" in str(missing.value)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ArtifactError, match="did you mean"):
        build(tmp_path / "tinny")
    (tmp_path / "work" / "line").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="did you mean 'work/line'"):
        build("line")
    with pytest.raises(ArtifactError, match="nothing to report"):
        build(tmp_path / "tiny")
    (tmp_path / "tiny" / "data-x").mkdir()
    (tmp_path / "tiny" / "data-x" / "hone.json").write_text("{")
    with pytest.raises(ArtifactError, match="data-x"):
        build(tmp_path / "tiny")
    assert not (tmp_path / "tiny" / "report").exists()


def test_absent_energy_is_said_and_never_zero(whole: Path, hostile: Path, tmp_path: Path) -> None:
    page, markdown, _ = read(whole, tmp_path / "absent")
    assert "Joules per token: not measured, no energy sensor (NVML, RAPL) on this machine." in page.text
    assert "no energy sensor (NVML, RAPL) on this machine" in markdown
    for words in (page.text, markdown):
        assert not re.search(r"(?<![\d.])0(\.0+)? [mkµ]?J\b", words)
    page, markdown, _ = read(hostile, tmp_path / "present")
    assert "not measured, no energy" not in page.text and "mJ/token" in page.text and re.search(r"\d J \|", markdown)


def test_picture_is_one_svg_with_its_own_colors(whole: Path, tmp_path: Path) -> None:
    path = picture(whole, tmp_path / "deep" / "picture.svg")
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = path.read_text()
    assert "var(" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    names = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"corpus", "base", "int4", "int4-rtn", "pruned", "speculative"} <= names
    again = picture(whole, tmp_path / "again.svg")
    assert again.read_bytes() == path.read_bytes()
    shutil.rmtree(tmp_path / "deep")


def test_a_text_with_every_kind_of_line_end_is_one_row(copy, tmp_path: Path) -> None:
    line = copy("data-corpus")
    rows = [{"step": "read", "reason": "odd", "source": "a", "text": "one\u2028two\u2029three\x85four\x0cfive"}]
    write_jsonl(line / "data-corpus" / "dropped.jsonl", rows)
    found = collect(line)
    assert found.rows[0].content["dropped.jsonl"] == rows
    changed = "changed after the artifact was made: its figures are of what was before"
    assert found.problems == [("data-corpus/dropped.jsonl", changed)]
