"""Scratch files of a training's state: which weights are in them, and how a disk is measured."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.train.offload import files, rates, states


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), share=st.floats(0, 1.1))
def test_weights_in_a_file_are_spread_among_the_others(sizes: list[int], share: float):
    tensors = {
        (f"w{at}", key): torch.empty(size, device="meta") for at, size in enumerate(sizes) for key in ("weight", "m")
    }
    memory = share * 8 * sum(sizes)
    found = states._spread(tensors, memory)
    held = 8 * sum(size for at, size in enumerate(sizes) if f"w{at}" in found)
    assert held <= memory
    filed = [size for at, size in enumerate(sizes) if f"w{at}" not in found]
    assert not filed or held + 8 * min(filed) > memory, "none of the file fits into memory, too"


def test_an_embedding_is_not_all_of_the_file():
    """Of a model whose table is as large as eight of its layers, a file of an eighth has parts of many layers."""
    sizes = {
        "embed": 80,
        **{f"layer{at}.{part}": size for at in range(24) for part, size in (("up", 6), ("down", 4))},
        "head": 80,
    }
    tensors = {(name, "weight"): torch.empty(size, device="meta") for name, size in sizes.items()}
    filed = sizes.keys() - states._spread(tensors, 4 * 7 / 8 * sum(sizes.values()))
    layers = sorted({int(name.partition(".")[0].removeprefix("layer")) for name in filed})
    assert len(layers) >= 8 and max(later - one for one, later in pairwise(layers)) <= 4
    assert sum(sizes[name] for name in filed) == pytest.approx(sum(sizes.values()) / 8, abs=4)


def test_the_probe_reads_and_writes_as_an_update_does(tmp_path, monkeypatch):
    seen = []
    for name in ("read", "write"):
        move = getattr(files.ScratchFile, name)
        monkeypatch.setattr(
            files.ScratchFile,
            name,
            lambda self, memory, offset, name=name, move=move: (
                seen.append((name, offset, len(memory))) or move(self, memory, offset)
            ),
        )
    rate, _ = rates.probe(tmp_path, 1 << 20)
    assert rate > 0
    filled, moved = (
        [one for one in seen if one[0] == "write"],
        seen[seen.index(next(one for one in seen if one[0] == "read")) :],
    )
    reads, writes = ([one[1:] for one in moved if one[0] == kind] for kind in ("read", "write"))
    assert sorted(reads) == sorted(writes) and len(set(reads)) == len(reads) == 3 * 8, (
        "each window once, there and back"
    )
    assert len(filled) == 2 * len(reads)
    assert [one[0] for one in moved[:12]] == ["read"] * 6 + ["write"] * 3 + ["read"] * 3, (
        "two windows come before one goes"
    )
