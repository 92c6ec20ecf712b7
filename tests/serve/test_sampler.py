"""The sampler against plain formulas: filters, penalties, draws, log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hone.serve.request import SamplingParams
from hone.serve.sampler import SampledToken, Sampler, logprobs, uniform
from hone.serve.sampling import RequestSampling, SeqSampling, Slots, sampling_of

VOCAB = 50
SAMPLER = Sampler(VOCAB)


def entry(tokens=(1, 2, 3), num_prompt=2, ends=(), **params) -> SeqSampling:
    return SeqSampling(RequestSampling(SamplingParams(**params), ends), list(tokens), num_prompt)


def reference_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that survive, by the definitions, one token at a time."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    peak = scaled[order[0]]
    kept = [token for token in order if scaled[token] >= peak + (math.log(min_p) if min_p else -math.inf)]
    if top_k:
        kept = kept[:top_k]
    weights = [math.exp(scaled[token] - peak) for token in kept]
    total, mass, final = sum(weights), 0.0, set()
    for token, weight in zip(kept, weights):
        if final and mass / total >= top_p:
            break
        final.add(token)
        mass += weight
    return final


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 2.0]),
            st.sampled_from([0, 1, 3, 49, 80]),
            st.sampled_from([1.0, 0.9, 0.31, 1e-6]),
            st.sampled_from([0.0, 0.05, 1.0]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_filters_keep_what_their_definitions_keep(seed, rows):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    entries = [entry(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in rows]
    kept = SAMPLER.filter(logits, sampling_of(entries)) > -math.inf
    for row, (values, options) in enumerate(zip(logits.double().tolist(), rows)):
        assert set(kept[row].nonzero().flatten().tolist()) == reference_kept(values, *options)


def test_draws_follow_the_softmax():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    entries = [entry(seed=seed, temperature=0.8) for seed in range(20_000)]
    tokens = SAMPLER.draw(logits.expand(len(entries), -1), sampling_of(entries)).tokens
    expected = (logits[0] / 0.8).softmax(-1) * len(entries)
    often = expected >= 5
    counts = torch.bincount(tokens, minlength=VOCAB)
    seen = [*counts[often].tolist(), int(counts[~often].sum())]
    should = [*expected[often].tolist(), float(expected[~often].sum())]
    scale = sum(seen) / sum(should)
    assert stats.chisquare(seen, [value * scale for value in should]).pvalue > 1e-3


def test_noise_is_gumbel_and_depends_on_seed_position_and_stream_alone():
    noise = Sampler(4000).noise(sampling_of([entry(seed=3), entry(seed=4)]))
    assert stats.kstest(noise.flatten().tolist(), "gumbel_r").pvalue > 1e-3
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.06
    alone = Sampler(4000).noise(sampling_of([entry(seed=4)]))
    assert torch.equal(alone[0], noise[1])
    assert not torch.equal(Sampler(4000).noise(sampling_of([entry(seed=4)]), [1])[0], noise[1])
    assert not torch.equal(Sampler(4000).noise(sampling_of([entry(tokens=(1, 2), seed=4)]))[0], noise[1])
    numbers = [uniform(seed, 5, 1) for seed in range(2000)]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3


def test_a_seed_may_be_negative_or_huge_and_none_is_random():
    for seed in (-(2**63), -1, 0, 2**64 - 1):
        assert torch.isfinite(SAMPLER.noise(sampling_of([entry(seed=seed)]))).all()
    assert entry().request.seed != entry().request.seed


def test_top_k_and_min_tokens_may_be_any_integer():
    """Clients may send any integer; the step's arrays hold 64 bits."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    huge, plain = entry(top_k=10**30, min_tokens=10**30, ends=(7,), seed=1), entry(min_tokens=9, ends=(7,), seed=1)
    assert SAMPLER.choose(logits, sampling_of([huge])) == SAMPLER.choose(logits, sampling_of([plain]))


@settings(max_examples=50)
@given(tokens=st.lists(st.integers(0, 9), min_size=3, max_size=12), num_prompt=st.integers(1, 3))
def test_penalties_by_their_definitions(tokens, num_prompt):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    one = entry(tokens, num_prompt, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    SAMPLER.seat(sampling_of([one]))
    found = SAMPLER.process(logits, sampling_of([one]))[0].tolist()
    for token, value in enumerate(logits[0].tolist()):
        if token in tokens:
            value = value / 1.5 if value > 0 else value * 1.5
        count = tokens[num_prompt:].count(token)
        value -= 0.25 * count + 0.5 * (count > 0)
        assert found[token] == pytest.approx(value, abs=1e-6)


def test_counts_grow_by_what_is_drawn_as_if_counted_from_the_start():
    """A slot is counted once, from the tokens known then; each draw adds its token."""
    params = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "temperature": 0}
    tokens, grown = [1, 2, 3], Sampler(VOCAB)
    slots, one = Slots(), SeqSampling(RequestSampling(SamplingParams(**params)), tokens, 3)
    for turn in range(12):
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(turn % 3))
        others = [entry((5, 5, 6), 1, **params)] if turn % 4 == 3 else []  # comes and goes: its slot is given again
        slots.begin([one, *others])
        sampling = sampling_of([one, *others], slots=slots)
        assert len(sampling.history) == (3 if turn == 0 else 0) + 3 * len(others)
        found = grown.choose(logits[: len(sampling)], sampling)
        again = Sampler(VOCAB).choose(logits[: len(sampling)], sampling_of([one, *others]))
        assert found == again
        tokens.append(found[0].token)


def test_biases_bans_and_untouched_logits():
    logits = torch.zeros(3, VOCAB)
    entries = [
        entry(logit_bias={4: 7.5}),
        entry(min_tokens=2, ends=(6, 8)),
        entry((1, 2, 3, 4), 2, min_tokens=2, ends=(6,)),
    ]
    found = SAMPLER.process(logits, sampling_of(entries))
    assert found[0, 4] == 7.5 and found[0].sum() == 7.5
    assert found[1, 6] == found[1, 8] == -math.inf and found[1].isinf().sum() == 2
    assert torch.equal(found[2], logits[2])
    assert not logits.any()
    assert SAMPLER.process(logits, sampling_of([entry()] * 3)) is logits


def test_mixed_sequences_get_what_they_would_get_alone():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[3, 7] = math.nan
    entries = [
        entry(temperature=0),
        entry(temperature=0.7, seed=5, top_k=4, logprobs=2),
        entry(temperature=0, logit_bias={9: 100.0}, logprobs=0),
        entry(temperature=0),
    ]
    together = SAMPLER.choose(logits, sampling_of(entries))
    alone = [SAMPLER.choose(logits[row : row + 1], sampling_of([one]))[0] for row, one in enumerate(entries)]
    assert [one.token for one in together[:3]] == [one.token for one in alone[:3]]
    assert [one.finite for one in together] == [one.finite for one in alone] == [True, True, True, False]
    assert together[0].token == int(logits[0].argmax()) and together[2].token == 9
    assert together[1].logprob == alone[1].logprob and together[0].logprob is None
    raw = logits[2].log_softmax(-1)
    assert together[2].logprob.logprob == pytest.approx(float(raw[9]), abs=1e-5)  # of the raw model, without the bias
    assert together[2].logprob.top == []


def test_logprobs_hold_the_best_and_the_token_itself():
    logits = torch.randn(700, VOCAB, generator=torch.Generator().manual_seed(4))
    expected = logits.log_softmax(-1)
    tokens = [int(row.argmax()) if place % 2 else int(row.argmin()) for place, row in enumerate(logits)]
    found = logprobs(logits, tokens, [place % 4 for place in range(700)])
    for place, (one, token) in enumerate(zip(found, tokens)):
        assert one.logprob == pytest.approx(float(expected[place, token]), abs=1e-5)
        count = place % 4
        assert len(one.top) == (0 if count == 0 else count if place % 2 else count + 1)
        if count and place % 2:  # greedy: exactly the best alternative's number
            assert one.top[0] == (token, one.logprob) and one.logprob == max(value for _, value in one.top)
        elif count:
            assert one.top[-1] == (token, one.logprob)
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)


PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}


def penalized_steps(device: str, vocab: int, steps: int = 4) -> list[list[SampledToken]]:
    """Choices of some steps of entries with and without penalties, log-probabilities and biases; each takes its tokens."""
    sampler, slots = Sampler(vocab, device), Slots()
    entries = [
        entry((1, 2, 2, 5), 2, temperature=0, logprobs=3, **PENALTIES),
        entry(temperature=1.0, seed=3),
        entry((4, 4), 2, temperature=0.8, seed=4, top_k=30, **PENALTIES),
        entry(temperature=0, logprobs=0, logit_bias={7: 2.0}),
        entry((3,), 1, temperature=0, logprobs=20, frequency_penalty=2.0),
    ]
    found = []
    for step in range(steps):
        if step == 2:
            entries.append(entry((9, 9, 8), 1, temperature=0, **PENALTIES))
        logits = torch.randn(len(entries), vocab, generator=torch.Generator().manual_seed(step)) * 3
        logits = logits.to(device)
        if step == 1:
            logits[1, 6] = math.nan
        slots.begin(entries)
        found.append(sampler.choose(logits, sampling_of(entries, slots=slots)))
        for one, chosen in zip(entries, found[-1]):
            one.tokens.append(max(chosen.token, 0))
    return found


def test_counts_follow_what_is_chosen() -> None:
    """The table of a step is what the tokens so far say, whoever joins."""
    tokens = {0: [1, 2, 2, 5], 5: [9, 9, 8]}
    for step, chosen in enumerate(penalized_steps("cpu", VOCAB)):
        count = len(chosen)
        logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(step)) * 3
        for place in (0, 5)[: 1 + (count > 5)]:
            before, row = tokens[place], logits[place].clone()
            for token in set(before):
                row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
            for token in before[2 if place == 0 else 1 :]:
                row[token] -= 0.4
            for token in set(before[2 if place == 0 else 1 :]):
                row[token] -= 0.7
            assert chosen[place].token == int(row.argmax())
            before.append(chosen[place].token)
        assert chosen[1].finite == (step != 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("vocab", [VOCAB, 128_256])
def test_a_gpu_chooses_what_a_cpu_chooses(vocab: int) -> None:
    """Tables of counts, penalties and log-probabilities by kernels, beside torch's operations."""
    for ours, theirs in zip(penalized_steps("cuda", vocab), penalized_steps("cpu", vocab)):
        for one, other in zip(ours, theirs):
            assert (one.token, one.finite) == (other.token, other.finite)
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-3)
                values = [[value for _, value in each.logprob.top] for each in (one, other)]
                assert values[0] == pytest.approx(values[1], abs=1e-3)
