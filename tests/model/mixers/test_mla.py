"""Latent attention against its formula, and the absorbed decoding against the expanded form."""

from __future__ import annotations

import math

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
PAIRS = {**LOW, "rope_interleaved": True, "latent_norm_eps": 0.1}


def formula(mixer, x: torch.Tensor) -> torch.Tensor:
    """arXiv:2405.04434, equations 9 to 19, head by head and token by token."""
    spec, seq_len = mixer.spec, x.shape[1]

    def norm(module, y):
        return y / (y.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight

    def turned(y):  # [B, S, rope_dim], the pair (i, i + half), or (2i, 2i + 1), by position * theta^(-2i/d)
        half = spec.rope_dim // 2
        out = torch.empty_like(y)
        for place in range(seq_len):
            for i in range(half):
                angle = torch.tensor(place * spec.rope.theta ** (-2 * i / spec.rope_dim), dtype=torch.float32).double()
                first, second = (2 * i, 2 * i + 1) if spec.rope_interleaved else (i, i + half)
                a, b = y[:, place, first], y[:, place, second]
                out[:, place, first] = a * angle.cos() - b * angle.sin()
                out[:, place, second] = b * angle.cos() + a * angle.sin()
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
@pytest.mark.parametrize("spec", [MLA, LOW, PAIRS])
def test_formula(spec):
    mixer = small(spec).layers[0].mixer
    assert spec is not PAIRS or mixer.latent_norm.eps == mixer.q_latent_norm.eps == 0.1
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, Causal(x[..., 0])), formula(mixer, x), atol=1e-6, rtol=1e-5)


def test_yarn_scales_the_scores_as_deepseek_does():
    """(0.1 mscale_all_dim ln(factor) + 1)^2 beside the tables' own factor; without a scaling of the positions there is none."""
    yarn = {"scaling": "yarn", "factor": 40.0, "original_max_seq_len": 16}
    plain, scaled = (small({**MLA, **more}).layers[0].mixer for more in ({}, {"rope": yarn, "mscale_all_dim": 0.707}))
    assert plain.scale == 9**-0.5
    assert scaled.scale == pytest.approx(9**-0.5 * (0.0707 * math.log(40.0) + 1) ** 2)
    assert small({**MLA, "mscale_all_dim": 0.707}).layers[0].mixer.scale == plain.scale


@pytest.mark.parametrize("spec", [MLA, LOW, PAIRS])
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
