"""Memory: three times the text needs hardly more of it, only the columns grow."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

FILE_BYTES = 17 << 20
"""More than one batch."""
DOCUMENT_WORDS = 1400
ALLOWED_BYTES = 48 << 20
"""For 34 MB more text: columns of 3,900 documents, the allocator's moods, and not three copies of a third file."""

STAGE = textwrap.dedent("""
    import resource, sys
    from hone.base.run import Run
    from hone.data.stage import Data

    spec = {"source": sys.argv[1], "tokenizer": {"vocab_size": 300, "max_train_bytes": 200_000}, "edits": ["lines"], "filters": ["length"]}
    made = Data.read(spec).make(sys.argv[2], run=Run(quiet=True))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, int(made.figures["input_bytes"].value))
""")


def write_rows(path: Path, seed: int, num_bytes: int = FILE_BYTES) -> None:
    """A file of documents of random words, none like another."""
    random = np.random.default_rng(seed)
    letters = random.integers(97, 123, (20_000, 8), np.uint8)
    words = [bytes(row[: 3 + row[0] % 6]).decode() for row in letters]
    size = 0
    with open(path, "w") as file:
        while size < num_bytes:
            text = " ".join(words[index] for index in random.integers(0, len(words), DOCUMENT_WORDS))
            size += file.write(json.dumps({"text": text}) + "\n")


@pytest.mark.slow(seconds=45)
def test_three_times_the_text_needs_hardly_more_memory(tmp_path):
    peaks = []
    for count in (0, 1, 3):  # the first compiles what is not compiled yet
        source = tmp_path / f"in-{count}"
        source.mkdir()
        write_rows(source / "small.jsonl", 99, 300_000)
        for number in range(count):
            write_rows(source / f"{number}.jsonl", number)
        command = [sys.executable, "-c", STAGE, str(source), str(tmp_path / f"out-{count}")]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peak, size = map(int, out.split())
        assert size > 0.95 * count * FILE_BYTES
        peaks.append(peak)
    assert peaks[2] - peaks[1] < ALLOWED_BYTES
