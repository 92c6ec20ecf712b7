"""Transformer-XL against its formula token by token, what its memory may teach, and decoding with a bounded state."""

from __future__ import annotations

import math

import pytest
import torch

from hone.model.context import Causal, Packed
from tests.model.mixers.small import (
    check_apart,
    check_causal,
    check_gradients,
    check_incremental,
    check_saved,
    prompt,
    small,
    state_count,
)

XL = {"kind": "transformer_xl", "segment": 4, "memory": 6}
EVEN = {"kind": "transformer_xl", "segment": 5, "memory": 5}
SHORT = {"kind": "transformer_xl", "segment": 7, "memory": 3}


def formula(mixer, x: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
    """arXiv:1901.02860, section 3.3, one pair at a time; keys and values outside a token's segment come from `keys`."""
    spec, seq_len, width = mixer.spec, x.shape[1], x.shape[2]
    keys = x if keys is None else keys
    inner, dim = spec.num_heads * spec.head_dim, spec.head_dim
    w_q, w_k, w_v = mixer.qkv.weight.split(inner)
    rows = []
    for i in range(seq_len):
        begin = i // spec.segment * spec.segment
        places = range(max(0, begin - spec.memory), i + 1)
        heads = []
        for head in range(spec.num_heads):
            part = slice(head * dim, (head + 1) * dim)
            q = x[:, i] @ w_q[part].T
            scores, values = [], []
            for j in places:
                source = x[:, j] if j >= begin else keys[:, j]
                steps = [(i - j) / 10000.0 ** (2 * n / width) for n in range(width // 2)]
                r = torch.tensor([*map(math.sin, steps), *map(math.cos, steps)], dtype=torch.float64)
                score = ((q + mixer.content_bias[head]) * (source @ w_k[part].T)).sum(-1)
                score = score + (q + mixer.distance_bias[head]) @ (mixer.distance.weight[part] @ r)
                scores.append(score / dim**0.5)
                values.append(source @ w_v[part].T)
            weights = torch.stack(scores, -1).softmax(-1)
            heads.append(torch.einsum("bk,kbd->bd", weights, torch.stack(values)))
        rows.append(torch.cat(heads, -1) @ mixer.out.weight.T)
    return torch.stack(rows, 1)


@torch.no_grad()
@pytest.mark.parametrize("spec", [XL, EVEN, SHORT])
@pytest.mark.parametrize("length", [1, 3, 4, 15, 16])
def test_formula(spec, length):
    mixer = small(spec).layers[0].mixer
    x = torch.randn(2, length, 24, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, Causal(x[..., 0])), formula(mixer, x), atol=1e-6, rtol=1e-5)


def test_the_memory_is_a_constant_but_its_projection_learns():
    mixer = small(XL).layers[0].mixer
    x = torch.randn(2, 11, 24, dtype=torch.float64, requires_grad=True)
    grads = []
    for run in (lambda: mixer(x, Causal(x[..., 0])), lambda: formula(mixer, x, keys=x.detach())):
        grads.append(torch.autograd.grad(run().square().sum(), [x, *mixer.parameters()]))
    for got, want in zip(*grads):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", [XL, EVEN, SHORT])
def test_decoding(spec):
    model = small(spec)
    carry = check_incremental(model, 27, [[27], [1] * 27, [6, 1, 20], [4, 4, 5, 14]])
    assert state_count(carry) == 2 * model.config.dims().state_values(27)
    assert model.config.dims().state_values(10_000) <= 2 * 2 * 24 * (spec["memory"] + spec["segment"])


def test_order_documents_folder(tmp_path):
    model = small(XL)
    check_causal(model, 15)
    check_apart(model, [5, 9, 6])
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def test_one_packed_document_is_the_whole_row():
    model, tokens = small(XL), prompt(2, 18)
    torch.testing.assert_close(model(tokens, Packed(torch.zeros(2, 18, dtype=torch.long))), model(tokens))


def test_gradients_within_a_segment():
    check_gradients(small({**XL, "segment": 8}), 8)
