"""Merging: the merged folder computes what the adapter did, quantized bases are left, tied heads stay, and what rounding erases is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.cli.dispatch import main
from hone.exports.merged.spec import MergeSpec
from hone.exports.merged.write import merge
from hone.model import hf
from hone.model.adapters import ADAPTERS, peft
from hone.model.adapters.trainable import Trainable
from hone.model.decoder import build
from hone.model.quantized.nf4_base import nf4_base
from hone.model.shape import Shape

SHAPE = Shape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_seq_len=64)
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


def base(folder: Path, *, tied: bool = False, wide: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """`wide`: of rows that blocks of 64 divide."""
    sizes = {"hidden_size": 64, "intermediate_size": 128} if wide else {}
    config = SHAPE.model_copy(update=sizes).config(50).model_copy(update={"tie_embeddings": tied})
    hf.save(build(config, seed=1, dtype=dtype), folder)
    return folder


def adapted(model: Path, folder: Path, std: float = 0.2, kind: str = "lora") -> Path:
    """A PEFT folder of a random adapter over `model`."""
    spec = ADAPTERS.read({"kind": kind})
    source = Trainable(hf.Checkpoint(model), spec)
    made, names, draw = source.build("cpu", torch.float32), peft.keys(source.config), torch.Generator().manual_seed(0)
    tensors = {}
    for index in range(2):
        for path, name in made.config.singles(index).items():
            if name in names:
                value = made.get_parameter(f"layers.{index}.{path}").detach()
                tensors[names[name]] = value + torch.empty_like(value).normal_(std=std, generator=draw)
    peft.write(folder, made.config, tensors, str(model))
    return folder


@torch.no_grad()
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_a_merged_model_computes_what_its_adapter_did(kind: str, tmp_path: Path) -> None:
    adapter = adapted(base(tmp_path / "base"), tmp_path / "adapter", kind=kind)
    made = merge(adapter, tmp_path / "merged")
    plain = hf.load(made.path)
    assert not plain.config.adapters and 0.999 < made.kept < 1.001 and made.error < 1e-3
    torch.testing.assert_close(plain(TOKENS), hf.load(adapter)(TOKENS), rtol=0, atol=2e-5)
    assert float((plain(TOKENS) - hf.load(tmp_path / "base")(TOKENS)).abs().max()) > 0.01
    with pytest.raises(ArtifactError, match="exists"):
        merge(adapter, tmp_path / "merged")
    merge(adapter, tmp_path / "merged", run=Run(quiet=True, redo=True))
    for folder, said in (
        (tmp_path / "base", "holds what the merge reads"),
        (tmp_path, "holds what"),
        (tmp_path / "notes", "no model folder"),
    ):
        folder.mkdir(exist_ok=True)
        with pytest.raises(ArtifactError, match=said):
            merge(adapter, folder, run=Run(quiet=True, redo=True))
        assert folder.exists()
    with pytest.raises(SpecError, match="has no adapter"):
        merge(made.path, tmp_path / "again")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_biases_are_those_that_the_adapter_adds(kind: str, tmp_path: Path) -> None:
    """IA3's factors of outputs multiply them, too."""
    model = build(SHAPE.model_copy(update={"family": "qwen2"}).config(50), seed=1)
    draw = torch.Generator().manual_seed(0)
    for name, part in model.named_parameters():
        if name.endswith("bias"):
            part.normal_(std=0.5, generator=draw)
    hf.save(model, tmp_path / "base")
    adapter = adapted(tmp_path / "base", tmp_path / "adapter", kind=kind)
    merged = hf.load(merge(adapter, tmp_path / "merged").path)
    torch.testing.assert_close(merged(TOKENS), hf.load(adapter)(TOKENS), rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_codes_become_weights_with_the_adapter(kind: str, tmp_path: Path) -> None:
    model = base(tmp_path / "dense", wide=True)
    hf.save(nf4_base(hf.Checkpoint(model)).build(), tmp_path / "nf4")
    adapter = adapted(tmp_path / "nf4", tmp_path / "adapter", kind=kind)
    made = merge(adapter, tmp_path / "merged")
    assert "no longer quantized" in made.describe()
    assert "quantization_config" not in json.loads((made.path / "config.json").read_text())
    torch.testing.assert_close(hf.load(made.path)(TOKENS), hf.load(adapter)(TOKENS), rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_tied_model_stays_tied(tmp_path: Path) -> None:
    adapter = adapted(base(tmp_path / "base", tied=True), tmp_path / "adapter")
    made = merge(adapter, tmp_path / "merged")
    assert json.loads((made.path / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(made.path / "model.safetensors")
    torch.testing.assert_close(hf.load(made.path)(TOKENS), hf.load(adapter)(TOKENS), rtol=0, atol=2e-5)


def test_a_merge_that_rounding_erases_is_refused(tmp_path: Path) -> None:
    """A change of 1e-5 of weights of .02 is less than half of the distance between numbers of bfloat16."""
    model = base(tmp_path / "base", dtype=torch.bfloat16)
    adapter = adapted(model, tmp_path / "adapter", std=1e-7)
    with pytest.raises(SpecError, match=r"bfloat16 keeps .* of the adapter's change") as caught:
        merge(adapter, tmp_path / "merged")
    assert "float32" in str(caught.value.fix) and not (tmp_path / "merged").exists()
    assert merge(adapter, tmp_path / "wide", MergeSpec(dtype="float32")).kept > 0.9


@torch.no_grad()
def test_onto_the_original_is_another_function(tmp_path: Path) -> None:
    """Of a base whose weights were changed, as by quantization: the adapter's change is added to other weights."""
    original = base(tmp_path / "original")
    changed = hf.load(original)
    for name, part in changed.named_parameters():
        if "mixer.qkv" in name:
            part.mul_(1.25)
    hf.save(changed, tmp_path / "base")
    adapter = adapted(tmp_path / "base", tmp_path / "adapter")
    spec = MergeSpec(merge="onto_original", original=str(original))
    onto, trained = (hf.load(merge(adapter, tmp_path / name, how).path) for name, how in (("onto", spec), ("as", None)))
    own = onto.layers[0].mixer.qkv.weight - hf.load(original).layers[0].mixer.qkv.weight
    added = trained.layers[0].mixer.qkv.weight - changed.layers[0].mixer.qkv.weight
    torch.testing.assert_close(own, added, rtol=0, atol=1e-6)
    torch.testing.assert_close(trained(TOKENS), hf.load(adapter)(TOKENS), rtol=0, atol=2e-5)
    with pytest.raises(SpecError, match="give both, or neither"):
        MergeSpec.read({"merge": "onto_original"})
    other = Shape(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=48, max_seq_len=64)
    hf.save(build(other.config(50), seed=1), tmp_path / "other")
    with pytest.raises(SpecError, match="has other layers"):
        merge(adapter, tmp_path / "x", MergeSpec(merge="onto_original", original=str(tmp_path / "other")))


def test_the_command_says_how_much_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapted(base(tmp_path / "base"), tmp_path / "adapter")
    assert main(["merge", str(adapter), f"--out={tmp_path / 'merged'}", "--quiet"]) == 0
    assert "of the adapter's change of the weights is kept" in capsys.readouterr().out
    assert main(["merge", str(adapter)]) == 2
    assert "--out" in capsys.readouterr().err
