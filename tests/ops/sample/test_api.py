"""Noise and filters against their definitions in plain Python, and draws that do not depend on the batch."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hone.base.errors import SpecError
from hone.ops import apply_token_bitmask, choose, count_tokens, penalize, sample, token_logprobs
from hone.ops.dispatch import Where
from hone.ops.sample.noise import GUMBEL, RESIDUAL, gumbel, noise_keys, token_hashes, uniform
from hone.ops.sample.penalties import IN_PROMPT
from hone.ops.sample.reference import filter_logits

MASK = (1 << 64) - 1


def splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def noise_by_hand(seed: int, position: int, stream: int, token: int) -> float:
    key = splitmix(splitmix(splitmix(seed & MASK) ^ position) ^ stream)
    x = token * 0x9E3779B1 % 2**32 ^ key % 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15) ^ (key >> 32)) * 0x846CA68B % 2**32
    x ^= x >> 16
    return -math.log(-math.log1p(-min((x + 0.5) * 2.0**-32, 1 - 2.0**-24)))


@settings(max_examples=100)
@given(
    st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**20), st.sampled_from([GUMBEL, RESIDUAL]), st.integers(0, 10**6)
)
def test_noise_is_its_definition(seed: int, position: int, stream: int, token: int) -> None:
    keys = noise_keys([seed], [position], [stream])
    found = gumbel(keys, token_hashes(torch.tensor([token])))
    assert found.item() == pytest.approx(noise_by_hand(seed, position, stream, token), rel=1e-5, abs=1e-6)
    signed = seed - (1 << 64) if seed >> 63 > 0 else seed
    assert torch.equal(noise_keys(torch.tensor([signed]), torch.tensor([position]), stream), keys)


def test_noise_is_gumbel() -> None:
    noise = gumbel(noise_keys([3, 4], [0, 0]), token_hashes(torch.arange(5000)))
    assert stats.kstest(noise.flatten().tolist(), "gumbel_r").pvalue > 1e-3
    # Neighbours in the vocabulary, positions of a seed and seeds at a position are independent.
    table = gumbel(
        noise_keys([s for s in range(40) for _ in range(40)], list(range(40)) * 40), token_hashes(torch.arange(60))
    )
    table = stats.norm.ppf(stats.gumbel_r.cdf(table.double().view(40, 40, 60).numpy()))
    for axis in range(3):
        assert abs((table.take(range(1, 40), axis) * table.take(range(39), axis)).mean()) < 5 / math.sqrt(39 * 40 * 40)
    exceeding = (table > 3.5).sum()  # 22 expected
    assert 5 < exceeding < 50
    assert stats.kstest([uniform(seed, 5, 1) for seed in range(2000)], "uniform").pvalue > 1e-3


def test_a_draw_depends_on_its_own_row_alone() -> None:
    logits = torch.randn(6, 50) * 2
    keys = noise_keys(range(6), range(6))
    options = (
        [0.0, 0.5, 1.0, 2.0, 1.0, 1.0],
        [0, 3, 0, 10, 0, 50],
        [1.0, 0.9, 0.5, 1.0, 0.2, 0.0],
        [0.0, 0.1, 0.0, 0.0, 0.3, 0.0],
    )
    together = sample(logits, *options, keys=keys)
    alone = [sample(logits[i : i + 1], *(each[i] for each in options), keys=keys[i : i + 1]) for i in range(6)]
    assert together.tolist() == [int(one) for one in alone]
    assert together[0] == logits[0].argmax() and together[5] == logits[5].argmax()


def test_several_draws_are_without_replacement() -> None:
    """In pairs of draws the second follows the softmax of what the first left."""
    logits, count = torch.tensor([[1.0, 0.0, -1.0, 0.5]]), 20_000
    pairs = sample(logits.expand(count, -1), 1.0, keys=noise_keys(range(count), [0] * count), several=2)
    p = logits[0].double().softmax(-1)
    expected = p[:, None] * p[None] / (1 - p[:, None])
    off = ~torch.eye(4, dtype=torch.bool)
    seen = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).view(4, 4)
    assert not seen.diagonal().any()
    assert stats.chisquare(seen[off].tolist(), (expected[off] * count).tolist()).pvalue > 1e-3
    assert sample(logits, 0.0, keys=noise_keys([0], [0]), several=3).tolist() == [[0, 3, 1]]


def test_draws_follow_the_filtered_softmax() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1)) * 2
    kept = filter_logits(logits, [0.8], [0.0], [6], [1.0])[0]
    count = 20_000
    tokens = sample(logits.expand(count, -1), 0.8, 6, keys=noise_keys(range(count), [0] * count))
    seen = torch.bincount(tokens, minlength=20)
    assert not seen[kept == -math.inf].any()
    expected = kept.double().softmax(-1) * count
    real = expected > 0
    scale = float(seen.sum() / expected.sum())
    assert stats.chisquare(seen[real].tolist(), (expected[real] * scale).tolist()).pvalue > 1e-3


@settings(max_examples=60)
@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=9),
    st.floats(0.3, 2.0), st.integers(0, 9), st.sampled_from([0.0, 0.2, 0.6, 0.95, 1.0]), st.sampled_from([0.0, 0.1, 0.5]),
)  # fmt: skip
def test_tensors_and_numbers_filter_alike(
    values: list[int], heat: float, top_k: int, top_p: float, min_p: float
) -> None:
    """The option tensors of `sample` and the lists of `filter_logits` keep the same tokens, ties and all."""
    logits = torch.tensor([values], dtype=torch.float32)
    kept = filter_logits(logits, [heat], [min_p], [top_k], [top_p])[0] > -math.inf
    keys = noise_keys(range(64), [1] * 64)
    drawn = sample(logits.expand(64, -1), heat, top_k, top_p, min_p, keys=keys)
    assert kept[drawn].all()
    # Noise added to what is kept alone draws the same: nothing kept was dropped.
    scores = (
        logits * torch.tensor(heat).reciprocal() + gumbel(keys, token_hashes(torch.arange(len(values))))
    ).masked_fill(~kept, -math.inf)
    assert torch.equal(drawn, scores.argmax(-1))


@settings(max_examples=60)
@given(st.integers(1, 70), st.integers(0, 4), st.randoms(use_true_random=False))
def test_a_bitmask_keeps_the_tokens_of_its_bits(vocab: int, num_rows: int, random: Random) -> None:
    kept = [[random.random() < 0.5 for _ in range(vocab)] for _ in range(2)]
    words = [
        [sum(bit << place for place, bit in enumerate(one[32 * w : 32 * w + 32])) for w in range(-(-vocab // 32))]
        for one in kept
    ]
    masks = torch.tensor(words, dtype=torch.int64).int()  # bit 31 is the sign
    rows = [random.choice((-1, 0, 1)) for _ in range(num_rows)]
    logits = torch.randn(num_rows, vocab)
    found = logits.clone()
    apply_token_bitmask(found, masks, torch.tensor(rows, dtype=torch.int64))
    for before, after, row in zip(logits.tolist(), found.tolist(), rows):
        assert after == [x if row < 0 or kept[row][token] else -math.inf for token, x in enumerate(before)]


def test_wrong_arguments_and_where_it_runs() -> None:
    with pytest.raises(SpecError, match="keys"):
        sample(torch.zeros(2, 5), 1.0, keys=torch.zeros(3, dtype=torch.int64))
    keys = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(SpecError, match="int64"):  # other noise than the key's
        sample(torch.zeros(2, 5), 1.0, keys=keys.int())
    with pytest.raises(SpecError, match=r"logits \(2, 0\)"):
        sample(torch.zeros(2, 0), 1.0, keys=keys)
    for name, wrong in (
        ("temperature", -1.0), ("temperature", [1.0, float("nan")]), ("temperature", [1.0] * 3), ("top_k", -1), ("top_p", -0.5),
        ("min_p", 1.5), ("min_p", [0.1, 2.0]),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=f"{name} (is|has)"):
            sample(torch.zeros(2, 5), **{"temperature": 1.0, "keys": keys, name: wrong})
    with pytest.raises(SpecError, match="several is 6, of 5 tokens"):
        sample(torch.zeros(2, 5), 1.0, keys=keys, several=6)
    tokens, peaks = sample(torch.tensor([[0.0, 2.0], [1.0, float("nan")]]), 0.0, keys=keys, peaks=True)
    assert tokens[0] == 1 and peaks[0] == 2 and peaks[1].isnan()
    h200 = Where("cuda", (9, 0), 132, (3, 6))
    assert choose("sample", h200, dtype=torch.float32).backend == "triton"
    assert choose("sample", h200, dtype=torch.float64).backend == "reference"
    assert choose("sample", Where(), dtype=torch.float32).backend == "reference"


def test_penalties_are_their_definition() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5], [1.0, -1.0, 2.0, 0.5], [1.0, -1.0, 2.0, 0.5]])
    counts = torch.zeros(2, 4, dtype=torch.int32)
    ones = torch.ones(4, dtype=torch.int64)
    count_tokens(counts, ones * 0, torch.tensor([0, 1, 1, 0]), prompt=True)
    count_tokens(counts, torch.tensor([0, 0, 1, -1]), torch.tensor([2, 2, 3, 0]))
    assert counts[0].tolist() == [IN_PROMPT, IN_PROMPT, 2, 0] and counts[1].tolist() == [0, 0, 0, 1]
    options = torch.tensor([[0.5, 0.25, 0.0], [0.1, 1.0, 0.0], [2.0, 1.0, 3.0]])
    made = penalize(logits, counts, torch.tensor([0, 1, -1]), *options)
    expected = [[0.5, -2.0, 2.0 / 2 - 0.5 - 0.2, 0.5], [1.0, -1.0, 2.0, 0.5 - 0.25 - 1.0], [1.0, -1.0, 2.0, 0.5]]
    torch.testing.assert_close(made, torch.tensor(expected))


def test_logprobs_of_tokens() -> None:
    logits = torch.randn(3, 50)
    own, values, ids = token_logprobs(logits.half(), torch.tensor([1, 2, 3]), 5)
    exact = logits.half().double().log_softmax(-1)
    torch.testing.assert_close(own.double(), exact[range(3), [1, 2, 3]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values.double(), exact.topk(5).values, atol=1e-5, rtol=1e-5)
    best = token_logprobs(logits.half(), ids[:, 0], 5)[0]
    assert torch.equal(best, values[:, 0])
