"""Damaged manifests and side files: the page is still a page, or the error is one line with a way out."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from hone.base.errors import ArtifactError
from hone.report import build, picture
from tests.report.markup import Walk

JUNK: list[Any] = [
    None,
    0,
    -1,
    1e308,
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_damaged_lines_still_give_a_page(whole: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    folder = tmp_path / "tiny"
    shutil.copytree(whole, folder)
    for path in sorted(folder.glob("*/*.json*")):
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
