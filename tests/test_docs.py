"""docs/techniques.md and the table of docs/ops.md are what the tables and the ledger say, docs/pipelines.md what the simulator does."""

from __future__ import annotations

from benchmarks import ops, pipelines_page
from benchmarks.techniques_page import page
from tests.conftest import ROOT


def test_the_page_of_techniques_is_up_to_date():
    fix = "run python -m benchmarks.techniques_page"
    assert (ROOT / "docs" / "techniques.md").read_text(encoding="utf8") == page(), fix


def test_the_table_of_ops_is_up_to_date():
    table = (ROOT / "docs" / "ops.md").read_text(encoding="utf8").split(ops.BEGIN)[1].split(ops.END)[0]
    assert table == ops.page(ops.newest()), "run python -m benchmarks.ops --page"


def test_the_drawings_and_tables_of_pipelines_are_those_of_the_simulator():
    written = pipelines_page.PAGE.read_text(encoding="utf8")
    assert written == pipelines_page.page(written), "run python -m benchmarks.pipelines_page"
