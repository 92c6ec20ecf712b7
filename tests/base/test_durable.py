"""Files that a user names: what is no regular file is refused at once, wherever data are read; and written files are durable."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hone.base.durable import input_file, write_atomic
from hone.base.errors import HoneError, SpecError
from hone.data.contamination.evaluation import read_evaluations
from hone.data.quality.lexicon import Lexicon
from hone.data.tokens.tokenizer import take
from hone.feed.files.listing import list_source
from hone.feed.mix.medu import read_examples
from hone.feed.mix.regmix import read_runs
from hone.feed.mix.utilities import read_table

READERS = {
    "source": lambda path, out: list_source(str(path)),
    "one of several sources": lambda path, out: list_source(["python", str(path)]),
    "evaluation set": lambda path, out: read_evaluations((str(path),), ()),
    "utilities": lambda path, out: read_table(path),
    "examples": lambda path, out: read_examples(path),
    "proxy runs": lambda path, out: read_runs(path, path),
    "lexicon": lambda path, out: Lexicon(words=(str(path),)).train(out),
    "tokenizer": lambda path, out: take(str(path.parent), out),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, reader):
    for name in ("tokenizer.json", "pipe.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(HoneError, match=r"is a pipe \(FIFO\), not a file|has no tokenizer.json"):
            READERS[reader](tmp_path / name, tmp_path)


def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "fine").write_text("x")
    cases = {
        tmp_path: "is a folder",
        Path("/dev/null"): "is a device",
        tmp_path / "none": "no file",
        tmp_path / "fine" / "below": "no file",
        tmp_path / "loop": "cannot be opened: Too many levels",
        tmp_path / ("x" * 300): "cannot be opened: File name too long",
    }
    for path, said in cases.items():
        with pytest.raises(SpecError, match=f"a.field: .*{said}"):
            input_file(path, "a.field")
    assert input_file(str(tmp_path / "fine"), "a.field") == tmp_path / "fine"


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_is_after(tmp_path, monkeypatch):
    done, renamed = [], os.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        if done[-1] == "file":
            assert os.fstat(descriptor).st_size == 3, "all of it was written"

    def replaced(old: Path, new: Path) -> None:
        done.append("name")
        renamed(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_atomic(tmp_path / "a", b"abc")
    assert done == ["file", "name", "folder"] and (tmp_path / "a").read_bytes() == b"abc"
