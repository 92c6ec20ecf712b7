"""Damaged manifests and side files: the page is still a page, or the error is one line with a way out."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.base.errors import ArtifactError
from hone.cost.pipeline.simulate import simulate
from hone.parallel.pipeline import draw
from hone.parallel.pipeline.schedules import SCHEDULES
from hone.report import build, picture
from hone.report.collect import collect, sound
from hone.report.sections.training import schedules
from tests.report.markup import Walk

JUNK: list[Any] = [
    None,
    0,
    -1,
    1e308,
    10**307,
    -(10**307),
    float("nan"),
    float("inf"),
    "",
    "text",
    [],
    {},
    [1, "a", None],
    {"a": {"b": None}},
    True,
]


def damage(values: Any, chance: random.Random) -> Any:
    """`values` with one place replaced by junk or removed."""
    places: list[tuple[Any, Any]] = []

    def walk(here: Any) -> None:
        for key in list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ():
            places.append((here, key))
            walk(here[key])

    walk(values)
    if places:
        here, key = chance.choice(places)
        if chance.random() < 0.3:
            del here[key]
        else:
            here[key] = chance.choice(JUNK)
    return values


def schedule(folder: Path, values: Any = None) -> None:
    """Gives a training the log/pipeline.json of a pipeline schedule, or one with `values`."""
    played = draw.content(simulate(SCHEDULES["1f1b"](2, 4)), "1F1B")
    (folder / "log").mkdir(exist_ok=True)
    (folder / "log" / "pipeline.json").write_text(json.dumps(played if values is None else values))


GOOD = ["F", False, 0, "F of stage 0", 0.0, 1.0]
BAD: list[Any] = [
    [],
    "text",
    {},
    *({"ranks": value} for value in (None, 5, [], [5], ["text"], [[]], [[], []], [GOOD], {"0": [GOOD]})),
    *(
        {"ranks": [[GOOD, value]]}
        for value in (
            7,
            "F",
            None,
            {},
            [],
            GOOD[:-1],
            [*GOOD, 1],
            [["F"], *GOOD[1:]],
            [None, *GOOD[1:]],
            [*GOOD[:4], None, 1.0],
            [*GOOD[:4], 0.0, "1"],
            [*GOOD[:4], 0.0, float("inf")],
            [*GOOD[:4], 0.0, 1e308],
            [*GOOD[:4], float("nan"), 1.0],
            [*GOOD[:4], 2.0, 1.0],
        )
    ),
    {"ranks": [[[*GOOD[:4], 0.0, 0.0]]]},
]


@pytest.mark.parametrize("values", BAD, ids=lambda values: json.dumps(values)[:60])
def test_a_damaged_schedule_is_not_drawn(values: Any, copy: Callable[..., Path]) -> None:
    folder = copy("train-base")
    schedule(folder / "train-base", values)
    assert schedules(collect(folder)) == []


def test_a_schedule_keeps_the_lines_of_ranks_without_passes(copy: Callable[..., Path]) -> None:
    folder = copy("train-base")
    schedule(folder / "train-base", {"schedule": ["x"], "seconds": "long", "bubble": {}, "ranks": [[], [GOOD]]})
    ((row, drawn, said),) = schedules(collect(folder))
    assert row.id == "train-base" and drawn.count("F of stage 0") == 2  # for two widths
    assert drawn.count(">1</text>") == 2 and "of passes in a step as planned" in said


@pytest.mark.parametrize("digits", [309, 400, 5000])  # of more than 4300, Python makes no int
def test_a_number_beyond_float_is_reported_as_damage(digits, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "tiny")
    steps = tmp_path / "tiny" / "train-base" / "steps.jsonl"
    manifest = tmp_path / "tiny" / "compress-int4" / "hone.json"
    first, rest = steps.read_text().split("\n", 1)
    steps.write_text(json.dumps({**json.loads(first), "tokens": 7}).replace("7", "7" * digits) + "\n" + rest)
    values = json.loads(manifest.read_text())
    values["figures"][0]["value"] = "HERE"
    manifest.write_text(json.dumps(values).replace('"HERE"', "-" + "7" * digits))
    problems = collect(tmp_path / "tiny").problems
    said = f"a whole number of {digits} digits"
    assert ("train-base/steps.jsonl", f"cannot be read: {said}") in problems
    assert ("compress-int4", f"compress-int4/hone.json is corrupt: ValueError {said}") in problems
    Walk(build(tmp_path / "tiny", tmp_path / "out").read_text())


def test_what_can_be_drawn_is_a_number_of_a_size_that_has_a_place():
    assert all(sound(value) for value in (0, -1, 1.5, 10**29, True))
    assert not any(sound(value) for value in (10**31, 10**400, -(10**5000), float("nan"), float("inf"), None, "1", []))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_damaged_lines_still_give_a_page(whole: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder = tmp_path / "tiny"
    shutil.copytree(whole, folder)
    schedule(folder / "train-base")
    for path in sorted(folder.glob("**/*.json*")):
        if path.name == "hone.json" and chance.random() < 0.6:
            continue
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(json.dumps(row) + "\n" for row in damage(rows, chance)))
        else:
            path.write_text(json.dumps(damage(json.loads(path.read_text()), chance)))
    try:
        index = build(folder, tmp_path / "out")
    except ArtifactError as error:
        assert error.fix
        return
    Walk(index.read_text())
    json.loads((tmp_path / "out" / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    picture(folder, tmp_path / "picture.svg")
