"""docs/compression.md holds the table that the ledger gives, and its commands can be read."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from benchmarks import sparse_products
from benchmarks.compression_page import PAGE, page, quoted
from hone.compress import STEPS
from hone.compress.stage import Compress
from hone.plan.fitting import QUOTED

METHODS = Path(__file__).parent.parent / "benchmarks" / "quality.yaml"


def test_the_page_is_that_of_the_ledger() -> None:
    text = PAGE.read_text(encoding="utf8")
    assert page(text) == text, "run python -m benchmarks.compression_page"


def test_what_fit_quotes_is_that_of_the_ledger() -> None:
    assert QUOTED.read_text(encoding="utf8") == quoted(), "run python -m benchmarks.compression_page"


def test_the_table_of_sparse_products_is_that_of_the_ledger() -> None:
    table = PAGE.read_text(encoding="utf8").split(sparse_products.BEGIN)[1].split(sparse_products.END)[0]
    assert table == sparse_products.page(sparse_products.measured()), "run python -m benchmarks.sparse_products --page"


def test_every_step_of_the_page_is_one() -> None:
    found = re.findall(r"`(\{kind: [^`]*\})`", PAGE.read_text(encoding="utf8"))
    assert len(found) > 8
    for text in found:
        if "..." not in text:
            STEPS.read(yaml.safe_load(text))


def test_every_method_of_the_benchmark_is_a_stage() -> None:
    for method in yaml.safe_load(METHODS.read_text(encoding="utf8")):
        fields = {name: value for name, value in method.items() if name not in ("name", "technique", "calibrated")}
        Compress.read(fields)
