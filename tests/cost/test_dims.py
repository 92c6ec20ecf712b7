"""Counts against models that are really built."""

from __future__ import annotations

import pytest

from hone.cost.dims import ModelDims, mean_positions
from hone.model.decoder import build
from hone.model.shape import Shape


@pytest.mark.parametrize("tie", [True, False])
def test_uniform_facts_are_those_of_the_built_model(tie):
    sizes = {
        "num_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_seq_len": 128,
    }
    dims = ModelDims.uniform(**sizes, head_dim=16, vocab_size=300, tie_embeddings=tie)
    decoder = build(Shape(**sizes, tie_embeddings=tie).config(300))
    assert dims.num_params == sum(parameter.numel() for parameter in decoder.parameters())
    assert decoder.config.dims() == dims
    assert dims.kv_values_per_token == 3 * 2 * 2 * 16


@pytest.mark.parametrize("seq_len", [1, 2, 7, 20])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_mean_positions_counts_a_causal_mask(seq_len, window):
    seen = [min(place + 1, window or seq_len) for place in range(seq_len)]
    assert mean_positions(seq_len, window) == pytest.approx(sum(seen) / seq_len)


def test_flops_per_token():
    dims = ModelDims.uniform(
        num_layers=1, hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=2, head_dim=4,
        vocab_size=10, max_seq_len=4,
    )  # fmt: skip
    weights = 24 * 8 + 8 * 8 + 32 * 8 + 8 * 16 + 10 * 8
    assert dims.flops_per_token(3) == 2 * weights + 4 * 2 * 4 * 2
