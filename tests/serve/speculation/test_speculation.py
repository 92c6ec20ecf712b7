"""Speculative decoding is exact: greedy tokens identical, sampled tokens of the model's own distribution."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hone.base.errors import SpecError
from hone.serve.engine import Engine, EngineSpec
from hone.serve.request import SamplingParams
from hone.serve.sampler import Sampler
from hone.serve.sampling import RequestSampling, SeqSampling, sampling_of
from hone.serve.speculation.drafter import Guess
from hone.serve.speculation.verification import verify
from tests.serve.small import (
    assert_all_free,
    decoder,
    dense_greedy,
    drain,
    engine,
    greedy,
    poison_freed_pages,
    request,
    tokens_of,
)

MODEL = decoder()
DRAFT = decoder(5, num_layers=1)
NEAR = decoder()  # the model, slightly off: its guesses are mostly right
with torch.no_grad():
    for _parameter in NEAR.parameters():
        _parameter.add_(torch.randn(_parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
PROMPTS = [[(5 * i + 2 * j) % 61 for j in range(1, 3 + 6 * i)] for i in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("draft", [MODEL, NEAR, DRAFT], ids=["itself", "near", "stranger"])
@pytest.mark.parametrize(
    "spec", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 3}, {"num_pages": 14, "enable_prefix_caching": False}]
)
def test_greedy_tokens_are_identical(draft, spec):
    one = engine(MODEL, draft, **spec)
    poison_freed_pages(one)
    done = one.generate(PROMPTS, greedy(24))
    for prompt, completion in zip(PROMPTS, done):
        assert completion.tokens == dense_greedy(MODEL, prompt, 24)
    counts = one.stats()
    assert counts["draft_tokens"] > 0 and counts["accepted_tokens"] <= counts["draft_tokens"]
    if draft is MODEL:
        assert counts["accepted_tokens"] == counts["draft_tokens"]
    assert_all_free(one)


def test_a_prompt_is_scored_beside_sequences_that_guess():
    one = engine(MODEL, NEAR, max_num_batched_tokens=64)
    for number, prompt in enumerate(PROMPTS[:2]):
        one.add(request(str(number), prompt, greedy(30)))
    one.step()
    one.step()
    assert one.stats()["draft_tokens"] > 0
    one.add(request("scored", PROMPTS[3], greedy(1, prompt_logprobs=1)))
    found = next(output.prompt_logprobs for output in drain(one)["scored"] if output.prompt_logprobs)
    expected = MODEL(torch.tensor([PROMPTS[3]]))[0].log_softmax(-1)
    for place, row in enumerate(found[1:], 1):
        assert row.logprob == pytest.approx(float(expected[place - 1, PROMPTS[3][place]]), abs=1e-4)


def test_a_right_guess_saves_steps():
    plain, fast = engine(MODEL), engine(MODEL, MODEL)
    plain.generate([PROMPTS[1]], greedy(25))
    fast.generate([PROMPTS[1]], greedy(25))
    assert plain.stats()["steps"] == 25
    assert fast.stats()["steps"] == 1 + 5  # the prompt's token, then rounds of 5: 4 guesses and one more


def test_prompt_lookup_guesses_repetitions():
    one = engine(MODEL, drafter={"kind": "prompt_lookup", "num_tokens": 3, "min_ngram": 1})
    prompts = [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3], PROMPTS[2]]
    done = one.generate(prompts, greedy(40))
    for prompt, completion in zip(prompts, done):
        assert completion.tokens == dense_greedy(MODEL, prompt, 40)
    assert one.stats()["draft_tokens"] > one.stats()["accepted_tokens"] > 0
    assert_all_free(one)


def test_prefix_pages_serve_model_and_draft_alike():
    one = engine(MODEL, MODEL)
    prompt = PROMPTS[3]
    first = one.generate([prompt], greedy(20))[0]
    before = one.stats()
    second = one.generate([prompt + first.tokens], greedy(20))[0]
    assert second.num_cached_tokens > len(prompt)
    assert second.tokens == dense_greedy(MODEL, prompt + first.tokens, 20)
    counts = one.stats()
    guessed = counts["draft_tokens"] - before["draft_tokens"]
    assert counts["accepted_tokens"] - before["accepted_tokens"] == guessed > 0


@pytest.mark.slow
@settings(max_examples=20)
@given(data=st.data())
def test_any_arrivals_and_aborts_with_a_draft(data):
    """Rows that start and stop guessing as others come and go, in a pool too small for all."""
    drafter = {
        "kind": "draft_model",
        "num_tokens": data.draw(st.integers(1, 4)),
        "max_num_seqs": data.draw(st.integers(1, 4)),
    }
    one = engine(MODEL, NEAR, block_size=3, num_pages=15, max_num_seqs=4, max_num_batched_tokens=9, drafter=drafter)
    poison_freed_pages(one)
    wanted, found, aborted = {}, {}, set()
    for number in range(data.draw(st.integers(2, 6))):
        prompt = [5, 9, 13, 2, 8, 1][: data.draw(st.integers(1, 6))] + data.draw(
            st.lists(st.integers(1, 5), max_size=6)
        )
        wanted[str(number)] = (prompt, data.draw(st.integers(1, 14)), data.draw(st.booleans()))
        penalty = 1.2 if wanted[str(number)][2] else 1.0  # sequences with penalties never guess
        one.add(request(str(number), prompt, greedy(wanted[str(number)][1], repetition_penalty=penalty)))
        for _ in range(data.draw(st.integers(0, 3))):
            for output in one.step():
                found.setdefault(output.request_id, []).append(output)
        if data.draw(st.integers(0, 3)) == 0:
            name = data.draw(st.sampled_from(sorted(wanted)))
            aborted |= {name} & set(one._seqs)
            one.abort(name)
    for name, outputs in drain(one).items():
        found.setdefault(name, []).extend(outputs)
    for name, (prompt, count, penalized) in wanted.items():
        if name not in aborted and not penalized:
            assert tokens_of(found[name]) == dense_greedy(MODEL, prompt, count)
    assert_all_free(one)


def _chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value that `counts` were drawn from `expected` probabilities; rare outcomes are put together."""
    total = float(counts.sum())
    often = expected * total >= 5
    seen = [*counts[often].tolist(), float(counts[~often].sum())]
    should = [*(expected[often] * total).tolist(), float(expected[~often].sum() * total)]
    if should[-1] < 1e-9:
        assert seen.pop() == 0
        should.pop()
    scale = sum(seen) / sum(should)
    return float(stats.chisquare(seen, [value * scale for value in should]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drawn", "certain"])
def test_verified_tokens_follow_the_models_distribution(kind):
    """The rejection rule alone, over 20,000 seeds: first token, and second token given the first."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = 6
    p = torch.randn(3, vocab_size, generator=generator) * 1.5  # p[0] after the prompt, p[1], p[2] after guesses
    q = (p[:2] + torch.randn(2, vocab_size, generator=generator)).softmax(-1)
    sampler = Sampler(vocab_size)
    params = SamplingParams(temperature=1.0)
    entries = [
        SeqSampling(RequestSampling(params.model_copy(update={"seed": seed})), [1, 2, 3], 3) for seed in range(20_000)
    ]
    if kind == "drawn":
        guesses = [Guess(torch.multinomial(q, 1, generator=generator).flatten().tolist(), q) for _ in entries]
    else:
        guesses = [Guess([2, 4]) for _ in entries]
    found = verify(sampler, p.repeat(len(entries), 1), sampling_of(entries), guesses)
    probs = p.softmax(-1)
    first = torch.bincount(torch.tensor([one[0].token for one in found]), minlength=vocab_size)
    assert _chi_square(first, probs[0]) > 1e-3
    kept = [one[1].token for one in found if len(one) > 1]
    assert _chi_square(torch.bincount(torch.tensor(kept), minlength=vocab_size), probs[1]) > 1e-3
    rate = sum(len(one) > 1 for one in found) / len(found)
    expected = torch.minimum(probs[0], q[0]).sum() if kind == "drawn" else probs[0, 2]
    assert rate == pytest.approx(float(expected), abs=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup"])
def test_sampled_pairs_follow_the_models_distribution(drafter):
    """Through the engine: 3,000 seeds, tokens two and three together against exact probabilities of a dense model."""
    model = decoder(2, vocab_size=7, num_layers=1)
    draft = decoder(3, vocab_size=7, num_layers=1) if drafter == "draft_model" else None
    kind = {"kind": drafter, "num_tokens": 2, **({"min_ngram": 1} if draft is None else {})}
    one = engine(model, draft, drafter=kind, max_num_seqs=32, max_num_batched_tokens=96, num_pages=256)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    common = {"max_tokens": 3, "temperature": 0.9, "top_k": 5, "ignore_eos": True}
    params = [SamplingParams(seed=seed, logit_bias={6: 0.5}, **common) for seed in range(3_000)]
    done = one.generate([prompt] * len(params), params)
    counts = torch.zeros(7, 7, 7)
    for completion in done:
        counts[tuple(completion.tokens)] += 1
    expected = torch.zeros(7, 7, 7)

    def probabilities(tokens: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([tokens]))[0, -1:].float()
        logits[:, 6] += 0.5
        kept = logits / 0.9
        return kept.masked_fill(kept < kept.topk(5).values[:, -1:], float("-inf")).softmax(-1)[0]

    with torch.inference_mode():
        for a, p_a in enumerate(probabilities(prompt).tolist()):
            for b, p_b in enumerate(probabilities([*prompt, a]).tolist()):
                expected[a, b] = p_a * p_b * probabilities([*prompt, a, b])
    assert one.stats()["accepted_tokens"] > 0
    assert _chi_square(counts.flatten(), expected.flatten()) > 1e-3


def test_logprobs_come_with_every_kept_token():
    plain = engine(MODEL).generate([PROMPTS[2]], greedy(12, logprobs=2))[0]
    fast = engine(MODEL, NEAR).generate([PROMPTS[2]], greedy(12, logprobs=2))[0]
    assert fast.tokens == plain.tokens
    for one, other in zip(fast.logprobs, plain.logprobs, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_failing_pass_with_a_draft_ends_only_its_request(monkeypatch):
    one = engine(MODEL, NEAR)
    real = one.runner.model.hidden

    def hidden(tokens, context):
        if (tokens == 60).any():
            raise RuntimeError("evil forward")
        return real(tokens, context)

    monkeypatch.setattr(one.runner.model, "hidden", hidden)
    one.add(request("good", [1, 2, 3], greedy(12)))
    for _ in range(2):
        one.step()
    one.add(request("evil", [1, 2, 60], greedy(4)))
    before = list(one._seqs["good"].tokens)
    found = drain(one)
    assert found["evil"][-1].finish == "error"
    assert before[3:] + tokens_of(found["good"]) == dense_greedy(MODEL, [1, 2, 3], 12)
    assert_all_free(one)


def test_drafter_and_draft_model_belong_together():
    with pytest.raises(SpecError, match="needs a draft model"):
        Engine(MODEL, EngineSpec(drafter="draft_model", num_pages=8))
    with pytest.raises(SpecError, match="uses no draft model"):
        Engine(MODEL, EngineSpec(drafter="prompt_lookup", num_pages=8), draft=DRAFT)
    with pytest.raises(SpecError, match="same tokenizer"):
        Engine(MODEL, EngineSpec(num_pages=8), draft=decoder(0, vocab_size=50))


def test_a_draft_model_with_other_merges_is_refused(tiny_llama, tmp_path):
    other = shutil.copytree(tiny_llama, tmp_path / "other")
    Engine(tiny_llama, EngineSpec(num_pages=8), draft=other)
    values = json.loads((other / "tokenizer.json").read_text())
    values["model"]["merges"].reverse()
    (other / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(SpecError, match="another tokenizer"):
        Engine(tiny_llama, EngineSpec(num_pages=8), draft=other)


def test_drafters_are_read_without_torch():
    code = "import sys; from hone.serve import DRAFTERS; [DRAFTERS[name] for name in DRAFTERS]; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_a_draft_model_catches_up_within_the_token_budget(monkeypatch):
    """Two sequences decode long beside a third, in which time nobody guesses; then both have more to read than a step may."""
    drafter = {"kind": "draft_model", "num_tokens": 3, "max_num_seqs": 2}
    one = engine(MODEL, MODEL, max_num_batched_tokens=12, drafter=drafter, enable_prefix_caching=False)
    guesser = one.runner.guesser
    real, read, lags, found = guesser._read, [], [], {}

    def counted(step, places, starts, lengths, tokens):
        read.append(len(tokens))
        return real(step, places, starts, lengths, tokens)

    monkeypatch.setattr(guesser, "_read", counted)
    lengths = {"a": 70, "b": 60, "c": 40}
    for number, (name, length) in enumerate(lengths.items()):
        one.add(request(name, PROMPTS[number], greedy(length)))
    while one.has_work:
        lags.append(max(len(seq.tokens) - seq.drafted for seq in one._seqs.values()))
        for output in one.step():
            found.setdefault(output.request_id, []).append(output)
    assert max(lags) > 24, "nobody fell behind: the test shows nothing"
    assert max(read) <= 12
    for number, (name, length) in enumerate(lengths.items()):
        assert tokens_of(found[name]) == dense_greedy(MODEL, PROMPTS[number], length)
    counts = one.stats()
    assert counts["accepted_tokens"] == counts["draft_tokens"] > 0, "who has caught up guesses right"
    assert_all_free(one)
