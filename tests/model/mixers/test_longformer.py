"""Longformer row by row: the window, the global columns in the same softmax, the global rows from projections of their own."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.model.context import Causal
from hone.model.incremental import generate
from hone.ops import rope
from tests.model.mixers.small import (
    check_apart,
    check_causal,
    check_gradients,
    check_incremental,
    check_saved,
    check_together,
    prompt,
    small,
    state_count,
)

LONG = {"kind": "longformer", "window": 4, "num_global": 2}
WIDE = {"kind": "longformer", "window": 3, "num_global": 5}


def formula(mixer, x: torch.Tensor, context: Causal) -> torch.Tensor:
    """arXiv:2004.05150, section 3, one query at a time."""
    spec, seq_len = mixer.spec, x.shape[1]
    turns = context.rotary(spec.rope, spec.head_dim, x.dtype)

    def heads(weight, rotated):
        made = (x @ weight.T).unflatten(-1, (-1, spec.head_dim))
        made = rope(made, *turns) if rotated else made
        return made.repeat_interleave(spec.num_heads // made.shape[2], 2)

    q, k, v = mixer.qkv.weight.split(mixer.rows["qkv"])
    far_k, far_v = mixer.global_kv.weight.split(mixer.rows["global_kv"])
    near = heads(q, True), heads(k, True), heads(v, False)
    far = heads(mixer.global_q.weight, True), heads(far_k, True), heads(far_v, False)
    rows = []
    for i in range(seq_len):
        is_global = i < spec.num_global
        seen = [
            j
            for j in range(seq_len)
            if (j <= i or spec.encoder) and (is_global or j < spec.num_global or abs(i - j) < spec.window)
        ]
        q, k, v = far if is_global else near
        weights = (torch.einsum("bhd,bkhd->bhk", q[:, i], k[:, seen]) / spec.head_dim**0.5).softmax(-1)
        rows.append(torch.einsum("bhk,bkhd->bhd", weights, v[:, seen]).flatten(-2))
    return torch.stack(rows, 1) @ mixer.out.weight.T


@torch.no_grad()
@pytest.mark.parametrize("spec", [LONG, WIDE, {**LONG, "encoder": True}, {**WIDE, "encoder": True}])
@pytest.mark.parametrize("length", [1, 3, 17])
def test_formula(spec, length):
    mixer = small(spec).layers[0].mixer
    x = torch.randn(2, length, 24, dtype=torch.float64)
    context = Causal(x[..., 0])
    torch.testing.assert_close(mixer(x, context), formula(mixer, x, context))


@pytest.mark.parametrize("spec", [LONG, WIDE])
def test_decoding_keeps_window_and_global_tokens(spec):
    model = small(spec)
    carry = check_incremental(model, 21, [[21], [1] * 21, [1, 3, 17], [6, 1, 14]])
    assert (
        state_count(carry)
        == 2 * model.config.dims().state_values(21)
        == 2 * 2 * 24 * (spec["num_global"] + spec["window"] - 1)
    )


@pytest.mark.parametrize("spec", [LONG, {**LONG, "encoder": True}])
def test_gradients_documents_folder(spec, tmp_path):
    model = small(spec)
    check_gradients(model, 9)
    check_apart(model, [5, 9, 1, 6])
    check_together(model, [5, 9, 1, 6])
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_order():
    check_causal(small(LONG), 15)
    model, tokens = small({**LONG, "encoder": True}), prompt(1, 12)
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 40
    assert not torch.allclose(model(other)[0, 0], model(tokens)[0, 0], atol=1e-6)
    with pytest.raises(SpecError, match="longformer"):
        generate(model, tokens, 1)
