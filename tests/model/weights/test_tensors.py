"""Declared tensors are those that models have, of every mixer and wherever norms stand."""

from __future__ import annotations

import pytest
import torch

from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.shape import Shape
from hone.model.weights.model import expected_shapes
from hone.model.weights.tensors import model_tensors, modules
from tests.model.test_linear_spec import VARIANTS, ids, model_of


def agree(config: ModelConfig) -> None:
    with torch.device("meta"):
        expected = expected_shapes(Decoder(config))
    declared = list(model_tensors(config))
    assert {tensor.name: tensor.shape for tensor in declared} == expected
    assert len(declared) == len(expected)
    weights = {tensor.module.name: tensor.shape for tensor in declared if tensor.module and len(tensor.shape) == 2}
    assert weights == {module.name: module.shape for module in modules(config)}


@pytest.mark.parametrize("mixer", VARIANTS, ids=ids)
def test_every_mixer(mixer) -> None:
    agree(model_of(mixer).config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norms", ["pre", "post", "both"])
def test_norms_and_ends(norms: str, tied: bool) -> None:
    shape = Shape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_seq_len=64)
    values = shape.config(40).model_dump(mode="json")
    layers = [{**layer, "norms": norms} for layer in values["layers"]]
    agree(ModelConfig.read({**values, "layers": layers, "tie_embeddings": tied}))
