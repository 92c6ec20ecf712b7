"""Sizes and operations that papers print, from hone's closed forms."""

from __future__ import annotations

import pytest

from hone.cost.facts import ModelFacts
from hone.parallel.pipeline.schedules import SCHEDULES
from hone.parallel.pipeline.simulate import simulate


def llama(
    hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, inner: int, vocab_size: int
) -> ModelFacts:
    return ModelFacts.uniform(
        num_layers=num_layers, hidden_size=hidden_size, intermediate_size=inner, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=128, vocab_size=vocab_size, max_seq_len=8192,
    )  # fmt: skip


LLAMA_8B = llama(4096, 32, 32, 8, 14336, 128256)
LLAMA_405B = llama(16384, 126, 128, 8, 53248, 128256)
QWEN_72B = llama(8192, 80, 64, 8, 29568, 152064)


def test_llama_3_405b_has_its_parameters_and_operations():
    """405.85 billion weights; 2.52 TFLOP a token of a causal sequence of 8,192 (arXiv:2407.21783; Megatron-Bridge prints 827
    TFLOP/s at 328 tokens/s)."""
    assert pytest.approx(405.85e9, rel=1e-4) == LLAMA_405B.num_params
    assert 3 * LLAMA_405B.flops_per_token(8192) == pytest.approx(2.524e12, rel=0.005)
    assert 3 * LLAMA_405B.flops_per_token(8192) == pytest.approx(827e12 / 328, rel=0.005)


@pytest.mark.parametrize(("facts", "num_bytes"), [(LLAMA_8B, 131_072), (LLAMA_405B, 516_096), (QWEN_72B, 327_680)])
def test_bytes_of_the_cache_a_token(facts, num_bytes):
    """Table 1 of arXiv:2505.09343, in bfloat16."""
    assert 2 * facts.kv_values_per_token == num_bytes


@pytest.mark.parametrize(("p", "v"), [(4, 2), (8, 3), (35, 3)])
def test_activations_of_the_first_stage(p, v):
    """arXiv:2205.05198, section 4.2.3: 1F1B holds those of all L layers, interleaved 1 + (p - 1) / (p v) times as many."""
    n = 8 * p
    plain, both = SCHEDULES["1f1b"](p, n), SCHEDULES["interleaved"](p, n, stages_per_rank=v)
    assert simulate(plain, sizes=[1 / p] * p).peaks[0] == pytest.approx(1)
    assert simulate(both, sizes=[1 / (p * v)] * (p * v)).peaks[0] == pytest.approx(1 + (p - 1) / (p * v))
