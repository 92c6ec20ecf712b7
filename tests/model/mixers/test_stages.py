"""Every causal mixer through the stages: trained on packed documents, quantized, scored, loaded, and writing."""

from __future__ import annotations

import json

import pytest
import torch

import hone
from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.base.spec import read_yaml
from hone.compress.stage import Compress
from hone.eval.stage import Eval
from hone.model.incremental import generate
from hone.model.mixers import MIXERS
from hone.model.shape import Shape
from hone.train.stage import Train
from tests.conftest import ROOT
from tests.test_contracts import tiny_model
from tests.train.conftest import write_data

QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Artifact:
    return Artifact.read(write_data(tmp_path_factory.mktemp("made") / "data-small"))


def spec(name: str) -> Train:
    """Two steps of the stack that the contracts use."""
    mixers = [layer.mixer.model_dump(mode="json") for layer in tiny_model(name).config.layers]
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    steps = {"batch_size": 4, "seq_len": 48, "steps": 2, "validation": {"sequences": 2}, "checkpoint": {"interval": 0}}
    return Train.read({"model": {**shape, "mixers": mixers, "max_seq_len": 96}, **steps})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MIXERS])
def test_it_trains_on_packed_documents_and_what_is_saved_writes(name, data, tmp_path):
    if not tiny_model(name).config.layers[1].mixer.causal:
        with pytest.raises(SpecError, match=f"'{name}'"):
            spec(name).make(tmp_path / "train-base", {"data": data}, QUIET)
        return
    made = spec(name).make(tmp_path / "train-base", {"data": data}, QUIET)
    model = hone.load(made.folder)
    assert generate(model, torch.zeros(1, 3, dtype=torch.long), 4).shape == (1, 7)
    assert made.figures["model_bytes"].estimate.value == pytest.approx(made.figures["model_bytes"].value, rel=0.05)


def test_the_recipe_of_mixers_reads():
    stages = read_yaml(ROOT / "recipes" / "mixers.yaml")["stages"]
    kinds = [[layer.mixer.kind for layer in Shape.read(one["model"]).config(2048).layers] for one in stages]
    assert kinds[0] == ["sliding_window", "attention"] * 2 and len(kinds) == 7
    assert kinds[5] == ["retnet", "retnet", "sliding_window", "attention"]
    assert kinds[6] == ["delta_net", "delta_net", "attention", "delta_net"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mla", "compressive", "gated_linear"])
def test_stacks_of_our_own_are_quantized_and_scored(name, data, tmp_path):
    made = spec(name).make(tmp_path / "train-base", {"data": data}, QUIET)
    compress = Compress.read({"steps": [{"kind": "rtn", "bits": 8, "group_size": 16}]})
    packed = compress.make(tmp_path / "compress-rtn", {"model": made}, QUIET)
    assert json.loads((packed.folder / "config.json").read_text())["model_type"] == "hone"
    tokens = torch.arange(30)[None]
    exact, close = hone.load(made.folder)(tokens), hone.load(packed.folder, dtype=torch.float32)(tokens)
    assert (close - exact).norm() < 0.05 * exact.norm()
    written = generate(hone.load(packed.folder, dtype=torch.float32), tokens, 5)
    assert written.shape == (1, 35)
    scored = Eval.read({"max_tokens": 400}).make(tmp_path / "eval", {"model": packed, "data": data}, QUIET)
    assert scored.figures
