"""Damaged checkpoints: any changed byte and any missing file is noticed before anything is restored, and the one before is used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hone.base.errors import ArtifactError
from hone.base.ranks import Mesh
from hone.train.checkpoint import Checkpoints, opened, verified
from tests.ranked import together

TENSORS = {
    "weight.a": torch.arange(6.0).reshape(2, 3),
    "exp_avg.a": torch.arange(5).to(torch.bfloat16),
    "codes.a": torch.arange(7, dtype=torch.uint8),
    "updates": torch.tensor(3.0),
    "empty": torch.empty(0),
}
NUMBERS = {"done": 2, "tokens": 7, "spikes": {"windows": {"loss": [0.1, float("nan")]}}}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Checkpoints of two steps."""
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, TENSORS, {**NUMBERS, "done": step}, {"weight.a": (3, 9)})
    return tmp_path


def test_every_byte_of_a_checkpoint_counts(kept):
    newest = kept / "step-00000002"
    for name in ("tensors.safetensors", "numbers.json"):
        whole = (newest / name).read_bytes()
        unnoticed = []
        for place in range(len(whole)):
            changed = bytearray(whole)
            changed[place] ^= 1
            (newest / name).write_bytes(changed)
            try:
                verified(newest, Mesh())
                unnoticed.append(place)
            except ArtifactError as error:
                assert f"the checkpoint {newest} is damaged: " in error.what
        # Spaces end a header.
        assert not [place for place in unnoticed if whole[place : place + 1] not in b" "], (name, unnoticed)
        (newest / name).write_bytes(whole)
    stored, _ = verified(newest, Mesh())
    assert all(torch.equal(stored.whole(name), tensor) for name, tensor in TENSORS.items())


def test_the_tensor_is_named_and_the_checkpoint_before_is_used(kept):
    file, said = kept / "step-00000002" / "tensors.safetensors", []
    content = bytearray(file.read_bytes())
    content[content.index(TENSORS["weight.a"].numpy().tobytes()) + 9] ^= 64
    file.write_bytes(content)
    stored, numbers = Checkpoints(kept).newest(said.append)
    assert numbers["done"] == 1 and torch.equal(stored.whole("weight.a"), TENSORS["weight.a"])
    assert said == [
        f"the checkpoint {file.parent} is damaged: tensors.safetensors: the bytes of weight.a are not those that were "
        "written; it is passed over"
    ]


def saved_on_ranks(folder: str) -> None:
    """Two checkpoints; rank 1 has nothing to write."""
    mesh = Mesh.from_environment()
    with mesh.together():
        for step in (1, 2):
            tensors: dict[str, Any] = {"weight.a": torch.full((4,), float(step))} if mesh.leads else {}
            Checkpoints(Path(folder), mesh=mesh).save(step, tensors, {"done": step})


def read_on_ranks(folder: str) -> list[Any]:
    """The step that this rank reads, what it says, and whether the ranks still meet."""
    mesh, said = Mesh.from_environment(), []
    with mesh.together():
        _, numbers = Checkpoints(Path(folder), mesh=mesh).newest(said.append)
        return [numbers["done"], said, mesh.gather(mesh.rank)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_file_of_a_rank_is_damage_on_all_ranks(rank, tmp_path):
    """Also that of a rank that held nothing; ranks in other numbers read on, whichever of them found it."""
    assert all(one.returncode == 0 for one in together(2, saved_on_ranks, str(tmp_path)))
    name = f"tensors-0000{rank}-of-00002.safetensors"
    (tmp_path / "step-00000002" / name).unlink()
    with pytest.raises(ArtifactError, match=f"step-00000002 is damaged: FileNotFoundError: {name} is missing"):
        opened(tmp_path / "step-00000002")
    first, *others = (one.result for one in together(3, read_on_ranks, str(tmp_path)))
    assert first[0] == 1 and len(first[1]) == 1 and f"{name} is missing" in first[1][0] and first[2] == [0, 1, 2]
    assert others == [[1, [], [0, 1, 2]]] * 2
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(ArtifactError, match="--redo starts the training over"):
        Checkpoints(tmp_path).newest()
