"""Linformer against its formula at every length up to its longest; it is an encoder and says so."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.model.context import Causal, Packed
from hone.model.decoder import build
from hone.model.incremental import generate
from hone.model.shape import Shape
from hone.ops import rope
from hone.serve.engine import Engine
from tests.model.mixers.small import check_gradients, check_saved, prompt, small

LOW = {"kind": "linformer", "max_seq_len": 20, "rank": 3}


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 13, 20])
def test_formula(length):
    mixer = small(LOW).layers[0].mixer
    x = torch.randn(2, length, 24, dtype=torch.float64)
    context = Causal(x[..., 0])
    q, k, v = (x @ mixer.qkv.weight.T).split([24, 12, 12], -1)
    cos, sin = context.rotary(mixer.spec.rope, 6, x.dtype)
    q, k = (rope(part.unflatten(-1, (-1, 6)), cos, sin).flatten(-2) for part in (q, k))
    heads = []
    for head in range(4):
        part = slice(head // 2 * 6, head // 2 * 6 + 6)
        keys = mixer.mix_keys[:length].T @ k[..., part]
        values = mixer.mix_values[:length].T @ v[..., part]
        heads.append((q[..., head * 6 : head * 6 + 6] @ keys.mT / 6**0.5).softmax(-1) @ values)
    torch.testing.assert_close(mixer(x, context), torch.cat(heads, -1) @ mixer.out.weight.T)


def test_gradients_folder_and_start(tmp_path):
    model = small(LOW)
    check_gradients(model, 20)
    check_saved(model, tmp_path, length=20)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())
    fresh = build(Shape(mixers=({**LOW, "rank": 16},)).config(64)).layers[0].mixer
    assert fresh.mix_keys.abs().max() <= 0.25 < fresh.mix_keys.abs().max() * 1.2
    assert not torch.equal(fresh.mix_keys, fresh.mix_values)


def test_what_an_encoder_cannot_do_is_said():
    model = small(LOW)
    with pytest.raises(SpecError, match=r"layer 0 .*linformer.*later tokens"):
        generate(model, prompt(1, 4), 2)
    with pytest.raises(SpecError, match="linformer"):
        Engine(model.float())
    with pytest.raises(SpecError, match="documents"):
        model(prompt(1, 4), Packed(torch.tensor([[0, 0, 1, 1]])))
    with pytest.raises(SpecError, match="20 tokens"):
        model(prompt(1, 21))


@pytest.mark.parametrize(("field", "value"), [("num_kv_heads", 3), ("head_dim", 5)])
def test_sizes_that_do_not_fit_are_named(field, value):
    with pytest.raises(SpecError, match=field):
        small({**LOW, field: value})
