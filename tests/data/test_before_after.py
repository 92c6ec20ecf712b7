"""The page of figures before and after is the one that the ledger gives."""

from __future__ import annotations

import pytest

pytest.importorskip("benchmarks.data_page")


def test_page_is_written_from_the_ledger():
    from benchmarks.data_page import CLASSES, PAGE, page

    text = page()
    assert PAGE.read_text(encoding="utf8") == text, "run python -m benchmarks.data_page"
    assert sum(len(rows) for rows in CLASSES.values()) == sum(
        line.startswith("| ") for line in text.splitlines()
    ) - len(CLASSES)
