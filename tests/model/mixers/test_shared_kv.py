"""Layers that reuse keys: the formula, the gradient back to the source layer, activation checkpointing, decoding, and stacks that cannot be."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.context import Causal
from hone.model.shape import Shape
from hone.ops import rope
from hone.train.inputs import student_config
from tests.model.mixers.small import (
    check_apart,
    check_causal,
    check_gradients,
    check_incremental,
    check_saved,
    check_together,
    dense,
    prompt,
    small,
    state_count,
)

LOCAL = {"kind": "sliding_window", "window": 5}
STACKS = [("attention", "shared_kv", "shared_kv"), (LOCAL, "shared_kv"), ("attention", LOCAL, "shared_kv")]


@torch.no_grad()
def test_it_attends_to_the_lenders_keys():
    model = small("attention", "shared_kv")
    source, reuser = model.layers[0].mixer, model.layers[1].mixer
    x, y = torch.randn(2, 2, 9, 24, dtype=torch.float64)
    context = Causal(x[..., 0])
    source(x, context)
    got = reuser(y, context)
    cos, sin = context.rotary(source.spec.rope, 6, x.dtype)
    heads = (x @ source.qkv.weight.T).unflatten(-1, (8, 6))
    k, v = rope(heads[..., 4:6, :], cos, sin), heads[..., 6:, :]
    q = rope((y @ reuser.q.weight.T).unflatten(-1, (4, 6)), cos, sin)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    want = dense(q, k, v, seen, 6**-0.5).flatten(-2) @ reuser.out.weight.T
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mixers", STACKS)
def test_decoding(mixers):
    model = small(*mixers, num_layers=len(mixers))
    carry = check_incremental(model, 19, [[19], [1] * 19, [6, 1, 12], [9, 1, 9]])
    assert state_count(carry) == 2 * model.config.dims().state_values(19)
    assert set(carry) == {index for index, mixer in enumerate(mixers) if mixer != "shared_kv"}


def test_gradients_order_documents_folder(tmp_path):
    model = small(LOCAL, "shared_kv", "shared_kv", num_layers=3, family="qwen3")
    check_gradients(model, 8)
    check_causal(model, 11)
    check_apart(model, [4, 6, 3])
    check_together(model, [4, 6, 3])
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("segments", [[[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]]])
def test_recomputed_layers_give_the_same_gradients(segments):
    model, tokens = small("attention", "shared_kv", num_layers=3), prompt(2, 9)
    model(tokens).square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    context, x = Causal(tokens), model.embed(tokens)

    def through(x, indices):
        for index in indices:
            x = model.layers[index](x, context)
        return x

    for indices in segments:
        x = checkpoint(through, x, indices, use_reentrant=False)
    model.head(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_what_cannot_be_borrowed_is_refused():
    with pytest.raises(SpecError, match="layer 0"):
        Shape(mixers=("shared_kv",)).config(64)
    config = Shape(num_layers=2, mixers=("attention", "shared_kv")).config(64)
    with pytest.raises(SpecError, match="head_dim"):
        values = config.model_dump(mode="json")
        values["layers"][1]["mixer"]["head_dim"] = 16
        ModelConfig.read(values)
    deep = Shape(num_layers=4, mixers=("attention", "shared_kv", "shared_kv", "attention")).config(64)
    assert [deep.kv_source(index) for index in range(4)] == [None, 0, 0, None]
    assert [layer.mixer.kind for layer in student_config(deep, 3).layers] == ["attention", "attention"]
    values = deep.model_dump(mode="json")
    with pytest.raises(SpecError, match="no layer before it"):
        ModelConfig.read({**values, "layers": values["layers"][1:]})
