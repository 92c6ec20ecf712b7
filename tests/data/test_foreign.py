"""Techniques of the user's own: by module:Class or by an entry point, used in every slot, with errors that tell what is wrong."""

from __future__ import annotations

import json
import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest

from hone.base import table as tables
from hone.base.errors import DriftError, SpecError
from hone.base.run import Run
from hone.base.table import all_tables, describe
from hone.data import DEDUPS, EXECUTORS, FILTERS, SCORERS
from hone.data.stage import Data
from tests.data.stories import story

QUIET = Run(quiet=True)
OWN = '''
from pydantic import Field
from hone.data.filters.base import Filter, Rule

class Even(Filter):
    """Keeps texts with a number of words divisible by `by`."""

    by: int = Field(2, ge=1, description="Divisor.")

    def rules(self):
        return [Rule("odd", f"words % {self.by} == 0")]

class Broken:
    pass
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "poetry.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "code" / "torn.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield tmp_path
    sys.modules.pop("poetry", None)


def offers(monkeypatch, *entries: tuple[str, str]) -> None:
    made = [EntryPoint(name, value, tables.GROUP) for name, value in entries]
    monkeypatch.setattr(tables, "entry_points", lambda group: made)


def make(own, kind: str, out: str, run: Run = QUIET, **options):
    (own / "in").mkdir(exist_ok=True)
    (own / "in" / "a.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(story(n, 300).split()[: 200 + n])}) + "\n" for n in range(12))
    )
    filters = [{"kind": kind, **options}]
    spec = Data.read({"source": str(own / "in"), "tokenizer": {"vocab_size": 300}, "filters": filters, "dedups": []})
    return spec, spec.make(own / out, run=run)


def test_a_class_of_the_users_filters_and_its_code_is_part_of_the_identity(own):
    spec, made = make(own, "poetry:Even", "out", by=3)
    (step,) = json.loads((made.folder / "stats.json").read_text())["steps"][1:]
    assert step["name"] == "poetry:Even" and 0 < step["documents_out"] < 12 and set(step["reasons"]) == {"odd"}
    assert Data.read(spec.model_dump(mode="json")) == spec
    (own / "code" / "poetry.py").write_text(textwrap.dedent(OWN) + "\n# changed\n")
    with pytest.raises(DriftError):
        spec.make(own / "out", run=QUIET)


@pytest.mark.slow
def test_workers_find_it(own):
    _, one = make(own, "poetry:Even", "one", by=3)
    _, two = make(own, "poetry:Even", "two", Run(quiet=True, executor={"kind": "processes", "workers": 1}), by=3)
    assert one.content == two.content


def test_a_package_offers_a_technique_by_an_entry_point(own, monkeypatch):
    offers(monkeypatch, ("filter.even", "poetry:Even"), ("filter.length", "poetry:Even"))
    technique = FILTERS.read({"kind": "even", "by": 5})
    assert type(technique).__name__ == "Even" and technique.by == 5 and technique.kind == "even"
    assert FILTERS["length"].__module__.startswith("hone.")  # hone's own names stay
    assert any("poetry" in line for line in describe("even")) and any("even" in line for line in describe("filter"))
    offers(monkeypatch, ("filter.even", "poetry:Even"), ("scorer.even", "poetry:Even"))
    with pytest.raises(SpecError, match=r"scorer 'even' \(poetry:Even\) is no scorer\n.*hone.data.quality.base:Scorer"):
        SCORERS.read("even")
    with pytest.raises(SpecError, match=r"unknown filter 'evn'\n.*did you mean 'even'"):
        FILTERS.read("evn")
    offers(monkeypatch, ("filter.even", "poetry:Even"), ("filter.even", "other:Even"))
    with pytest.raises(SpecError, match="two packages offer filter 'even'"):
        FILTERS.read("even")


def test_mistakes_are_said(own):
    for kind, message in (
        ("poetry:Broken", "filter 'poetry:Broken' is no filter\n.*hone.data.filters.base:Filter"),
        ("poetry:Odd", "cannot be imported: AttributeError"),
        ("nowhere_at_all:Odd", "cannot be imported: ModuleNotFoundError"),
        ("torn:Odd", "cannot be imported: ZeroDivisionError"),
    ):
        with pytest.raises(SpecError, match=message):
            FILTERS.read({"kind": kind})
    with pytest.raises(SpecError, match="by"):
        FILTERS.read({"kind": "poetry:Even", "by": 0})


def test_an_instance_of_the_users_class_is_named_after_it(own):
    import poetry

    assert FILTERS.read(poetry.Even(by=2)).kind == "poetry:Even"
    with pytest.raises(SpecError, match="is not in the dedup table"):
        DEDUPS.read(poetry.Even(by=2))


def test_every_slot_has_a_base_class():
    assert EXECUTORS._base().__name__ == "Executor" and DEDUPS._base().__name__ in ("Dedup", "Joined")
    for slot, table in all_tables().items():
        assert all(issubclass(table[name], table._base()) for name in table), slot
