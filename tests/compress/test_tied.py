"""A stored head that differs from the embedding to which config.json ties it is the model's head, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.model import hf
from hone.model.facts import CheckpointFacts


@pytest.fixture
def own_head(family_folder, tmp_path: Path) -> Path:
    """A folder that says its head is tied, and stores another."""
    source = family_folder("llama")
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    head = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(1)) / 50
    tensors["lm_head.weight"] = head.to(tensors["model.embed_tokens.weight"].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_stored_head_is_used_and_said(own_head: Path) -> None:
    import transformers

    tokens = torch.arange(12).view(1, -1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(own_head, dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match="stores a head that differs from the embedding"):
        ours = hf.load(own_head, dtype=torch.float32)
    assert ours.lm_head is not None
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert not CheckpointFacts.of(own_head).config.tie_embeddings


def test_a_compressed_folder_says_that_they_are_apart(own_head: Path, tmp_path: Path) -> None:
    """Another reader than transformers would tie them, and be another model than the one that was checked."""
    run = Run(quiet=True)
    spec = Compress.read({"steps": [{"kind": "rtn", "group_size": 32}]})
    made = spec.make(tmp_path / "compress-small", {"model": Artifact.read(own_head)}, run).folder
    assert json.loads((made / "config.json").read_text())["tie_word_embeddings"] is False
    head = hf.Checkpoint(made).tensor("lm_head.weight")
    assert torch.equal(head, load_file(own_head / "model.safetensors")["lm_head.weight"])
    assert hf.load(made).lm_head is not None


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight", "vision.patch.weight"])
def test_a_tensor_that_the_model_does_not_read_is_named_before_it_is_lost(
    name: str, own_head: Path, tmp_path: Path
) -> None:
    tensors = load_file(own_head / "model.safetensors")
    save_file(tensors | {name: torch.ones(4)}, own_head / "model.safetensors", metadata={"format": "pt"})
    spec = Compress.read({"steps": [{"kind": "rtn", "group_size": 32}]})
    with pytest.raises(Exception, match=f"{name} is not a tensor of the"):
        spec.make(tmp_path / "compress-small", {"model": Artifact.read(own_head)}, Run(quiet=True))
