"""QLoRA in `hone train`: an adapter beside the codes of an NF4 folder, which stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.model import hf
from hone.model.decoder import build
from hone.model.quantized.nf4 import NF4
from hone.model.quantized.nf4_base import nf4_base
from hone.train.stage import Train
from tests.train.conftest import SHAPE

SIZES = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128}
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


def test_an_adapter_is_trained_beside_the_codes(data_folder: Path, tmp_path: Path) -> None:
    meta = json.loads((data_folder / "tokens" / "meta.json").read_text())
    config = SHAPE.model_copy(update=SIZES).config(meta["vocab_size"], eos=meta["eos_token_id"])
    hf.save(build(config, seed=3), tmp_path / "dense", data_folder)
    hf.save(nf4_base(hf.Checkpoint(tmp_path / "dense")).build(), tmp_path / "nf4", data_folder)
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(tmp_path / "nf4")}
    spec = {"steps": 6, "batch_size": 8, "seq_len": 32, "optimizer": {"kind": "adamw", "lr": 1e-2}}
    with pytest.raises(SpecError, match="quantized weights, which cannot be trained") as caught:
        Train.read(spec).make(tmp_path / "refused", parents, Run(quiet=True))
    assert "adapter" in caught.value.fix
    made = Train.read({**spec, "adapter": {"kind": "lora", "rank": 4}}).make(
        tmp_path / "qlora", parents, Run(quiet=True)
    )
    rows = [json.loads(line) for line in (made.folder / "steps.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    trained, base = hf.load(made.folder), hf.load(tmp_path / "nf4")
    linears = {name: one for name, one in base.named_modules() if isinstance(one, NF4)}
    assert len(linears) == 4
    for name, one in linears.items():
        assert torch.equal(trained.get_submodule(f"{name}.inner").codes, one.codes)
    with torch.no_grad():
        assert not torch.equal(trained(TOKENS), base(TOKENS))


def test_loftq_begins_nearer_to_the_dense_weights_and_is_trained_on(data_folder: Path, tmp_path: Path) -> None:
    """The compress stage's adapter has scale 1, and a training without `adapter` goes on with it, beside the same codes."""
    meta = json.loads((data_folder / "tokens" / "meta.json").read_text())
    config = SHAPE.model_copy(update=SIZES).config(meta["vocab_size"], eos=meta["eos_token_id"])
    hf.save(build(config, seed=3), tmp_path / "dense", data_folder)
    dense = {"model": Artifact.read(tmp_path / "dense")}
    steps = [{"kind": "nf4", "double_quant": True}, {"kind": "loftq", "rank": 8}]
    begun = Compress.read({"steps": steps}).make(tmp_path / "loftq", dense, Run(quiet=True))
    model, whole = hf.load(begun.folder), hf.load(tmp_path / "dense")
    assert model.config.adapters[0].scale == 1.0
    qkv, wanted = model.layers[0].mixer.qkv, whole.layers[0].mixer.qkv.weight.detach()
    lost, left = (float((one.dequantize(torch.float32).detach() - wanted).norm()) for one in (qkv.inner, qkv))
    assert left < 0.95 * lost
    spec = {"steps": 3, "batch_size": 8, "seq_len": 32, "optimizer": {"kind": "adamw", "lr": 1e-2}}
    parents = {"data": Artifact.read(data_folder), "model": begun}
    made = Train.read(spec).make(tmp_path / "tuned", parents, Run(quiet=True))
    again = hf.load(made.folder)
    assert torch.equal(again.layers[0].mixer.qkv.inner.codes, qkv.inner.codes)
    factor = again.layers[0].mixer.qkv.lora_A_q.detach()
    assert factor.shape == (8, 64) and not torch.equal(factor, qkv.lora_A_q.detach())
    losses = [json.loads(line).get("loss") for line in (made.folder / "steps.jsonl").read_text().splitlines()]
    assert losses[0] is not None and losses[2] < losses[0]


def test_loftq_as_an_adapter_names_the_stage_that_begins_it() -> None:
    """With its options given, too; the command that is named makes what a training without `adapter` goes on with."""
    with pytest.raises(SpecError, match="adapter 'loftq' is begun by another stage") as caught:
        Train.read({"adapter": {"kind": "loftq", "rank": 8}})
    command = caught.value.fix
    steps = command[command.index("--steps='") + 9 :].partition("'")[0]
    assert [one.kind for one in Compress.read({"steps": yaml.safe_load(steps)}).steps] == ["nf4", "loftq"]
