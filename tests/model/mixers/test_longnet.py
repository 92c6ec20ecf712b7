"""LongNet against its formula token by token, its branch weights' gradient, bounded decoding."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.model.context import Causal
from hone.ops import rope
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

NET = {"kind": "longnet", "segments": [4, 12], "dilations": [1, 3]}
DEEP = {"kind": "longnet", "segments": [3, 8, 16], "dilations": [1, 2, 4]}


def formula(mixer, x: torch.Tensor, context: Causal, ids: torch.Tensor | None = None) -> torch.Tensor:
    """arXiv:2307.02486, section 3.2: branch outputs weighted by their share of the softmax denominators."""
    spec, seq_len = mixer.spec, x.shape[1]
    turns = context.rotary(spec.rope, spec.head_dim, x.dtype)
    q, k, v = (part.unflatten(-1, (-1, 6)) for part in (x @ mixer.qkv.weight.T).split([24, 12, 12], -1))
    q, k = rope(q, *turns), rope(k, *turns)
    rows = []
    for i in range(seq_len):
        heads = []
        for head in range(spec.num_heads):
            kv_head = head // 2
            tops, bottoms = 0.0, 0.0
            for length, stride in spec.branches:
                if i % length % stride != kv_head % stride:
                    continue
                begin = i // length * length
                for j in range(begin + kv_head % stride, min(begin + length, seq_len), stride):
                    if j > i and not spec.encoder:
                        break
                    weight = ((q[:, i, head] * k[:, j, kv_head]).sum(-1) / 6**0.5).exp()
                    tops = tops + weight[:, None] * v[:, j, kv_head]
                    bottoms = bottoms + weight
            heads.append(tops / bottoms[:, None])
        rows.append(torch.cat(heads, -1))
    return torch.stack(rows, 1) @ mixer.out.weight.T


@pytest.mark.parametrize("spec", [NET, DEEP, {**NET, "encoder": True}, {**DEEP, "encoder": True}])
@pytest.mark.parametrize("length", [1, 5, 12, 29])
def test_formula_and_its_gradient(spec, length):
    mixer = small(spec).layers[0].mixer
    x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
    context = Causal(x[..., 0])
    got, want = mixer(x, context), formula(mixer, x, context)
    torch.testing.assert_close(got, want)
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()]) for out in (got, want))):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [NET, DEEP])
def test_decoding(spec):
    model = small(spec)
    for length in (24, 29):
        carry = check_incremental(model, length, [[length], [1] * length, [6, 1, length - 7], [13, length - 13]])
        assert state_count(carry) == 2 * model.config.dims().state_values(length)
    bound = sum(length // stride + stride for length, stride in zip(spec["segments"], spec["dilations"]))
    assert max(model.config.dims().state_values(count) for count in range(999)) <= 2 * 2 * 12 * bound


@pytest.mark.parametrize("spec", [NET, {**DEEP, "encoder": True}])
def test_gradients_documents_folder(spec, tmp_path):
    model = small(spec)
    check_gradients(model, 14)
    check_apart(model, [5, 9, 6])
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_order_and_sizes():
    check_causal(small(DEEP), 21)
    for wrong in ({"dilations": [2, 4]}, {"dilations": [1]}, {"segments": [4, 10]}):
        with pytest.raises(SpecError, match="dilation"):
            small({**NET, **wrong})
    with pytest.raises(SpecError, match="longnet"):
        from hone.model.incremental import generate

        generate(small({**NET, "encoder": True}), prompt(1, 3), 1)
