"""QLoRA in `hone train`: an adapter beside the codes of an NF4 folder, which stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
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
