"""What leaves with a head or a channel follows from what a layer declares: latents, experts and gates too."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from hone.compress.structured.cut import Cut, cut_model
from hone.model.decoder import Decoder, build
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.hf import Checkpoint, save
from hone.model.shape import Shape
from tests.model.mixers.small import widen

MIXERS = {
    "grouped": {"kind": "attention", "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "qkv_bias": True, "qk_norm": True},
    "latent": {"kind": "mla", "num_heads": 3, "head_dim": 8, "rope_dim": 4, "latent_dim": 12, "value_dim": 6},
    "two latents": {
        "kind": "mla", "num_heads": 3, "head_dim": 8, "rope_dim": 4, "latent_dim": 12, "q_latent_dim": 10, "value_dim": 6,
    },
}  # fmt: skip
STAY = (0, 2)
"""Of three heads, or groups of them."""


@pytest.fixture(autouse=True)
def experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEED_FORWARDS.rows, "top_experts", "tests.model.extensions.top_experts:TopExperts")


def saved(folder: Path, **changes: dict) -> Decoder:
    """A model in float32 of which `folder` has the weights; `changes` are the blocks of its layers."""
    shape = Shape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24, max_seq_len=64)
    config = shape.config(40)
    layers = [{**layer, **changes} for layer in config.model_dump(mode="json")["layers"]]
    model = build(type(config).read({**config.model_dump(mode="json"), "layers": layers}), seed=1)
    widen(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that transformers cannot read it
        save(model, folder)
    return model


@torch.no_grad()
def agree(folder: Path, whole: Decoder, cut: Cut) -> None:
    """What `cut` leaves computes what the whole model does, in which nothing reads what leaves."""
    source = cut_model(Checkpoint(folder), cut)
    assert all(source.shape(name) == tuple(source.tensor(name).shape) for name in source.names())
    tokens = torch.arange(40).view(2, 20) * 7 % 40
    torch.testing.assert_close(source.build()(tokens), whole(tokens), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_a_head_takes_all_that_is_its_own_along(name: str, tmp_path: Path) -> None:
    whole = saved(tmp_path, mixer=MIXERS[name])
    for layer in whole.layers:
        layer.mixer.out.weight.unflatten(1, (3, -1))[:, 1] = 0
    agree(tmp_path, whole, Cut((0, 1), kv_heads=(STAY, STAY)))


@torch.no_grad()
def test_a_channel_leaves_every_expert(tmp_path: Path) -> None:
    kept = tuple(range(0, 24, 3))
    whole = saved(tmp_path, feed_forward={"kind": "top_experts", "intermediate_size": 24, "num_experts": 4, "top_k": 2})
    for layer in whole.layers:
        layer.feed_forward.down.weight[..., [place for place in range(24) if place not in kept]] = 0
    agree(tmp_path, whole, Cut((0, 1), intermediate=(kept, kept)))


@torch.no_grad()
def test_a_layer_leaves_a_hybrid_stack(tmp_path: Path) -> None:
    whole = saved(tmp_path, mixer={"kind": "gated_linear", "num_heads": 2, "head_dim": 16})
    whole.layers = nn.ModuleList([whole.layers[1]])
    agree(tmp_path, whole, Cut((1,)))
