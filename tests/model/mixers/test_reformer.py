"""Reformer against its definition token by token: buckets, chunks, rounds, and nothing from the future."""

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
    check_together,
    small,
    state_count,
)

LSH = {"kind": "reformer", "num_buckets": 4, "chunk": 3, "num_rounds": 2}
MANY = {"kind": "reformer", "num_buckets": 2, "chunk": 2, "num_rounds": 3, "num_heads": 2, "head_dim": 8}


def formula(mixer, x: torch.Tensor, context: Causal) -> torch.Tensor:
    """arXiv:2001.04451, section 2, one token, head and round at a time."""
    spec, (batch, seq_len, _) = mixer.spec, x.shape
    width = spec.num_heads * spec.head_dim
    shared, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in (x @ mixer.qk_v.weight.T).split(width, -1))
    buckets = mixer._hash(shared)
    q = rope(shared, *context.rotary(spec.rope, spec.head_dim, x.dtype))
    k = q / q.square().sum(-1, keepdim=True).sqrt()
    out = torch.zeros_like(v)
    for row in range(batch):
        for head in range(spec.num_heads):
            for i in range(seq_len):
                tops, bottoms = 0.0, 0.0
                for turn in range(spec.num_rounds):
                    mine = buckets[row, turn, head]
                    fellows = [j for j in range(i) if mine[j] == mine[i]]
                    chunk = len(fellows) // spec.chunk
                    for j in fellows[max(0, chunk - 1) * spec.chunk :]:
                        weight = ((q[row, i, head] * k[row, j, head]).sum() / spec.head_dim**0.5).exp()
                        tops, bottoms = tops + weight * v[row, j, head], bottoms + weight
                out[row, i, head] = tops / bottoms if torch.is_tensor(bottoms) else v[row, i, head]
    return out.flatten(-2) @ mixer.out.weight.T


@torch.no_grad()
@pytest.mark.parametrize("spec", [LSH, MANY])
@pytest.mark.parametrize("length", [1, 2, 31])
def test_definition(spec, length):
    mixer = small(spec).layers[0].mixer
    x = torch.randn(2, length, 24, dtype=torch.float64)
    context = Causal(x[..., 0])
    torch.testing.assert_close(mixer(x, context), formula(mixer, x, context))


@torch.no_grad()
def test_like_tokens_share_buckets_and_rounds_differ():
    mixer = small({**LSH, "num_buckets": 8}).layers[0].mixer
    x = torch.randn(1, 400, 4, 6, dtype=torch.float64)
    buckets, near, far = (mixer._hash(one) for one in (x, 3 * x + 0.01 * torch.randn_like(x), torch.randn_like(x)))
    assert (buckets == near).float().mean() > 0.95
    assert (buckets == far).float().mean() < 0.2
    assert (buckets[:, 0] == buckets[:, 1]).float().mean() < 0.2
    assert buckets.min() == 0 and buckets.max() == 7


@pytest.mark.parametrize("spec", [LSH, MANY])
def test_decoding_keeps_two_chunks_of_every_bucket(spec):
    model = small(spec)
    carry = check_incremental(model, 37, [[37], [1] * 37, [20, 1, 16], [5, 13, 19]])
    counts = sum(buckets.count.numel() for buckets in carry.values())
    assert state_count(carry) - counts == 2 * model.config.dims().state_values(37)


@pytest.mark.parametrize("spec", [LSH, MANY])
def test_order_documents_folder(spec, tmp_path):
    model = small(spec)
    check_causal(model, 33)
    check_apart(model, [9, 14, 5])
    check_together(model, [9, 14, 5])
    check_saved(model, tmp_path)
    assert model.config.num_params == sum(parameter.numel() for parameter in model.parameters())


def test_gradients():
    check_gradients(small(LSH), 14)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(SpecError, match="num_buckets"):
        small({**LSH, "num_buckets": 5})
