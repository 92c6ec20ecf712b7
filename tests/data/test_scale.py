"""The grown corpus is what it says it is, and the extrapolation is the arithmetic that docs/scale.md states."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.data import growth, scale
from benchmarks.data.corpus import jaccard, shingles
from benchmarks.data.growth import Pool, documents


@pytest.fixture(scope="module")
def pool() -> Pool:
    """Sentences of random words in two languages, one with letters of two bytes, and lines of code."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefghij"), 6)) for _ in range(4000)]
    prose = [(" ".join(draw.choice(words, 12)) + ".").encode() for _ in range(3000)]
    accented = [sentence.replace(b"a", "ä".encode()) for sentence in prose[:500]]
    code = [b"x = " + sentence for sentence in prose[:500]]
    pieces = [*prose, *accented, *code]
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    borders = np.array([0, 3000, 3500, 4000])
    reach, lines = np.array([0.75, 0.9, 1.0]), np.array([False, False, True])
    return Pool(np.frombuffer(b"".join(pieces), np.uint8), starts, borders, reach, lines)


def test_a_document_depends_on_its_number_alone(pool):
    whole = list(documents(pool, 3, 2, 0, 400_000).strings())
    assert list(documents(pool, 3, 2, 40, 200_000).strings())[:10] == whole[40:50]
    assert list(documents(pool, 4, 2, 0, 200_000).strings())[:10] != whole[:10]


@pytest.mark.slow
def test_shares_of_copies_are_the_stated_ones(pool):
    made = list(documents(pool, 0, 0, 0, 8_000_000).strings())
    counts = Counter(made)
    again = sum(count - 1 for count in counts.values())
    assert again / len(made) == pytest.approx(growth.EXACT, abs=0.02)
    own = {text for text in counts if len(text) > 400}
    by_start: dict[str, list[str]] = {}
    for text in own:
        by_start.setdefault(text[:12], []).append(text)
    near = [
        jaccard(shingles(one), shingles(other))
        for group in by_start.values()
        for place, one in enumerate(group)
        for other in group[:place]
    ]
    similar = [value for value in near if value > 0.3]
    assert len(similar) > 0.03 * len(own) and 0.6 < np.median(similar) < 0.9
    # Two documents that are no copies share next to nothing.
    draw = np.random.default_rng(1)
    pairs = draw.choice(sorted(own), (200, 2))
    assert np.median([jaccard(shingles(str(one)), shingles(str(other))) for one, other in pairs]) < 0.02


def run(gigabytes: float, start: float = 12.0, slope: float = 200.0) -> dict:
    documents = gigabytes * 300_000
    return {
        "gigabytes": gigabytes,
        "input_documents": documents,
        "kept_documents": documents / 2,
        "tokens": gigabytes * 2e8,
        "seconds": 100 * gigabytes + 20,
        "cpu_seconds": start + slope * gigabytes,
        "steps": {"read": 40 * gigabytes, "tokenize": 50 * gigabytes},
        "parent_bytes": 5e8 + 100 * documents,
        "worker_bytes": 6e8,
        "disk_bytes": 2e9 * gigabytes,
        "workers": 2,
    }


def test_the_extrapolation_is_the_stated_arithmetic():
    found = [run(0.1), run(1), run(10)]
    assert scale.fit(found, "cpu_seconds", "gigabytes") == pytest.approx((12, 200, 0), abs=1e-6)
    assert scale.fit(found, "parent_bytes", "input_documents") == pytest.approx((5e8, 100, 0), abs=1e-3)
    cost = scale.costs(found, 0.05)
    assert cost["core_hours_a_terabyte"] == pytest.approx(200 * 1000 / 3600)
    assert cost["terabytes_a_trillion_tokens"] == pytest.approx(5)
    assert cost["dollars_a_trillion_tokens"] == pytest.approx(5 * 200 * 1000 / 3600 * 0.05)
    # What does not lie on a line is said to be off it; one size alone has no start that could be told from the rest.
    assert scale.fit([run(0.1), run(1), run(10, slope=300)], "cpu_seconds", "gigabytes")[2] > 0.05
    assert scale.fit([run(1)], "cpu_seconds", "gigabytes") == pytest.approx((0, 212, 0))


def test_the_tables_have_a_row_a_size():
    found = [run(0.1), run(1)]
    lines = scale.markdown(found, 0.05).splitlines()
    assert lines[2].startswith("| 0.10 | 30,000 | 30 | 4.0 | 0.0 | 0.0 | 5.0 | 0.0 | 21.0 | 32 |")
    assert len({line.count("|") for line in lines[:4]}) == 1
    rows = scale.ledger_rows(found, 0.05)
    assert all(row["area"] == "scale" and row["value"] > 0 and row["unit"] for row in rows)
    assert sum(row.get("how") == "modelled" for row in rows) == 4
