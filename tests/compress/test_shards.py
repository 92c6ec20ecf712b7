"""Shards: exact size ahead of time, and what a full disk says."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from hone.base.errors import FitError
from hone.compress import shards
from hone.model.weights.header import DTYPES

NAMES = st.text("abz.09_", min_size=1, max_size=20)
ENTRIES = st.dictionaries(
    NAMES,
    st.tuples(
        st.sampled_from([getattr(torch, name) for name in DTYPES.values()]), st.lists(st.integers(0, 9), max_size=3)
    ),
    max_size=8,
)


@settings(max_examples=60)
@given(entries=ENTRIES)
def test_size_is_known_to_the_byte(entries: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("shard") / "model.safetensors"
    shards.write_shard(path, {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in entries.items()})
    assert path.stat().st_size == shards.shard_bytes((name, *entry) for name, entry in entries.items())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_a_clear_error(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("hone.model.shards.save_file", full)
    with pytest.raises(FitError, match="no space left"):
        shards.write_shard(tmp_path / "x.safetensors", {"a": torch.zeros(3)})
    assert not list(tmp_path.iterdir())
