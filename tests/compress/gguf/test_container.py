"""The container: gguf-py reads what is written, sizes are known in advance, and a file is whole or absent."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import ArtifactError, FitError
from hone.compress.gguf.container import Entry, file_bytes, header, write
from hone.compress.gguf.formats import FORMATS

METADATA = {
    "general.architecture": "llama",
    "test.count": 7,
    "test.scale": 0.25,
    "test.yes": True,
    "test.texts": ["a", "\u2581\u00e9", ""],
    "test.numbers": [3, -1, 4],
    "test.floats": [0.5, -1e9],
}
ENTRIES = [Entry("a.weight", 3, 64, FORMATS["q4_0"]), Entry("b.bias", 5, 0, FORMATS["f32"])]


def contents() -> list[list[bytes]]:
    return [[bytes(range(36)), bytes(72)], [np.arange(5, dtype=np.float32).tobytes()]]


def test_gguf_py_reads_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    head = header(METADATA, ENTRIES)
    write(tmp_path / "a.gguf", head, ENTRIES, iter(contents()))
    assert (tmp_path / "a.gguf").stat().st_size == file_bytes(head, ENTRIES)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    for key, value in METADATA.items():
        assert reader.fields[key].contents() == value, key
    first, second = reader.tensors
    assert (first.name, first.shape.tolist(), first.tensor_type.name) == ("a.weight", [64, 3], "Q4_0")
    assert bytes(first.data.reshape(-1)) == b"".join(contents()[0])
    assert second.data.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert first.data_offset % 32 == 0 and second.data_offset % 32 == 0


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    head = header(METADATA, ENTRIES)

    def failing():
        yield contents()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.gguf", head, ENTRIES, failing())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="35 bytes were written"):
        write(tmp_path / "a.gguf", head, ENTRIES, iter([[bytes(35)], [bytes(20)]]))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(FitError, match="the disk has 100"):
        write(tmp_path / "a.gguf", header(METADATA, ENTRIES), ENTRIES, iter(contents()))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_no_file(tmp_path: Path) -> None:
    def full():
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(FitError, match="no space left"):
        write(tmp_path / "a.gguf", header(METADATA, ENTRIES), ENTRIES, iter([full(), []]))
    assert list(tmp_path.iterdir()) == []


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with open(tmp_path / "a.gguf.partial", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match="another process"):
            write(tmp_path / "a.gguf", header(METADATA, ENTRIES), ENTRIES, iter(contents()))
        assert (tmp_path / "a.gguf.partial").exists(), "the other process's file stays"
