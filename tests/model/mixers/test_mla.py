"""Latent attention against its formula, and the absorbed decoding against the expanded form."""

from __future__ import annotations

import pytest
import torch

from hone.model.context import Causal
from tests.model.mixers.small import (
    check_apart,
    check_causal,
    check_gradients,
    check_incremental,
    check_saved,
    check_together,
    small,
    state_count,
)

MLA = {"kind": "mla", "num_heads": 3, "head_dim": 5, "rope_dim": 4, "latent_dim": 7}
LOW = {**MLA, "q_latent_dim": 6, "value_dim": 8}


def formula(mixer, x: torch.Tensor) -> torch.Tensor:
    """arXiv:2405.04434, equations 9 to 19, head by head and token by token."""
    spec, seq_len = mixer.spec, x.shape[1]

    def norm(module, y):
        return y / (y.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight

    def turned(y):  # [B, S, rope_dim], the pair (i, i + half) by position * theta^(-2i/d)
        half = spec.rope_dim // 2
        out = torch.empty_like(y)
        for place in range(seq_len):
            for i in range(half):
                angle = torch.tensor(place * spec.rope.theta ** (-2 * i / spec.rope_dim), dtype=torch.float32).double()
                a, b = y[:, place, i], y[:, place, i + half]
                out[:, place, i] = a * angle.cos() - b * angle.sin()
                out[:, place, i + half] = b * angle.cos() + a * angle.sin()
        return out

    if spec.q_latent_dim is None:
        q = x @ mixer.q.weight.T
    else:
        q = norm(mixer.q_latent_norm, x @ mixer.q_down.weight.T) @ mixer.q_up.weight.T
    down = x @ mixer.kv_down.weight.T
    latent, k_turned = norm(mixer.latent_norm, down[..., : spec.latent_dim]), turned(down[..., spec.latent_dim :])
    up = latent @ mixer.kv_up.weight.T
    width, both, heads = spec.head_dim + spec.rope_dim, spec.head_dim + spec.values, []
    for head in range(spec.num_heads):
        q_head = q[..., head * width : (head + 1) * width]
        q_head = torch.cat((q_head[..., : spec.head_dim], turned(q_head[..., spec.head_dim :])), -1)
        k = torch.cat((up[..., head * both : head * both + spec.head_dim], k_turned), -1)
        scores = q_head @ k.mT / width**0.5
        scores = scores.masked_fill(torch.ones(seq_len, seq_len).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ up[..., head * both + spec.head_dim : (head + 1) * both])
    return torch.cat(heads, -1) @ mixer.out.weight.T


@torch.no_grad()
@pytest.mark.parametrize("spec", [MLA, LOW])
def test_formula(spec):
    mixer = small(spec).layers[0].mixer
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, Causal(x[..., 0])), formula(mixer, x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", [MLA, LOW])
def test_decoding_from_latents(spec):
    model = small(spec)
    carry = check_incremental(model, 17, [[17], [1] * 17, [6, 1, 10], [4, 13]])
    assert state_count(carry) == 2 * 2 * 17 * (7 + 4) == 2 * model.config.dims().state_values(17)


def test_gradients_order_documents_folder(tmp_path):
    model = small(LOW)
    check_gradients(model, 7)
    check_causal(model, 11)
    check_apart(model, [4, 6, 3])
    check_together(model, [4, 6, 3])
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())
