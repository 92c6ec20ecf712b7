"""docs/techniques.md is what the tables and the ledger say."""

from __future__ import annotations

from benchmarks.techniques_page import page
from tests.conftest import ROOT


def test_the_page_of_techniques_is_up_to_date():
    fix = "run python -m benchmarks.techniques_page"
    assert (ROOT / "docs" / "techniques.md").read_text(encoding="utf8") == page(), fix
