"""The container: gguf-py reads what is written, sizes are known in advance, and a file is whole or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import ArtifactError, FitError
from hone.exports.gguf.container import Entry, file_bytes, header, write
from hone.exports.gguf.formats import FORMATS

METADATA = {
    "general.architecture": "llama",
    "test.count": 7,
    "test.scale": 0.25,
    "test.yes": True,
    "test.texts": ["a", "\u2581\u00e9", ""],
    "test.no_text": "caf?",
    "test.numbers": [3, -1, 4],
    "test.floats": [0.5, -1e9],
}
ENTRIES = [Entry("a.weight", 3, 64, FORMATS["q4_0"]), Entry("b.bias", 5, 0, FORMATS["f32"])]


def contents() -> list[list[bytes]]:
    return [[bytes(range(36)), bytes(72)], [np.arange(5, dtype=np.float32).tobytes()]]


def test_gguf_py_reads_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    head = header({**METADATA, "test.no_text": os.fsdecode(b"caf\xe9")}, ENTRIES)  # the name of a folder
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


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "no space left for"), (errno.EFBIG, "4 GiB on FAT")])
def test_a_disk_that_fills_up_leaves_no_file(code: int, said: str, tmp_path: Path) -> None:
    def full():
        raise OSError(code, os.strerror(code))
        yield

    with pytest.raises(FitError, match=said):
        write(tmp_path / "a.gguf", header(METADATA, ENTRIES), ENTRIES, iter([full(), []]))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_with_a_largest_file_is_said(tmp_path: Path) -> None:
    """The error comes when the buffer is written, which may be as late as the close."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(FitError, match="ulimit -f"):
            write(tmp_path / "a.gguf", header(METADATA, ENTRIES), ENTRIES, iter(contents()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_written_over_and_takes_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = header(METADATA, ENTRIES)
    room = file_bytes(head, ENTRIES)
    (tmp_path / "a.gguf.partial").write_bytes(bytes(room // 2))

    def usage(folder: Path) -> object:
        return type("Usage", (), {"free": room - sum(path.stat().st_size for path in folder.iterdir())})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    write(tmp_path / "a.gguf", head, ENTRIES, iter(contents()))
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert (tmp_path / "a.gguf").read_bytes().startswith(head) and (tmp_path / "a.gguf").stat().st_size == room


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with open(tmp_path / "a.gguf.partial", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match="another process"):
            write(tmp_path / "a.gguf", header(METADATA, ENTRIES), ENTRIES, iter(contents()))
        assert (tmp_path / "a.gguf.partial").exists(), "the other process's file stays"


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_another_process_finishes_meanwhile_stays(
    replace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renamed between this one's opening of its partial file and the lock; with `replace` it is asked for anew."""
    lock, renamed = fcntl.flock, []

    def late(file, how: int) -> None:
        if not renamed:
            Path(file.name).write_bytes(b"whole")
            os.replace(file.name, tmp_path / "a.gguf")
        renamed.append(file)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    head = header(METADATA, ENTRIES)
    if replace:
        write(tmp_path / "a.gguf", head, ENTRIES, iter(contents()), replace=True)
        assert (tmp_path / "a.gguf").read_bytes().startswith(head)
    else:
        with pytest.raises(ArtifactError, match=r"a\.gguf exists"):
            write(tmp_path / "a.gguf", head, ENTRIES, iter(contents()))
        assert (tmp_path / "a.gguf").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_a_partial_file_that_another_process_removes_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has failed between this one's opening of its partial file and the lock."""
    lock, removed = fcntl.flock, []

    def late(file, how: int) -> None:
        if not removed:
            os.unlink(file.name)
        removed.append(file)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write(tmp_path / "a.gguf", header(METADATA, ENTRIES), ENTRIES, iter(contents()))
    assert len(removed) == 2 and [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
