"""Losses against transformers and against distributions known on paper; divergence of a model from itself is exactly 0."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import hone
from hone.base.errors import SpecError
from hone.eval.compare import agreement, divergence
from hone.eval.perplexity import perplexity
from hone.eval.score import score


@pytest.fixture(scope="module")
def decoder(tiny_llama):
    return hone.load(tiny_llama).eval()


@pytest.fixture(scope="module")
def oracle(tiny_llama):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def text(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count)


def their_losses(oracle, tokens: np.ndarray) -> np.ndarray:
    """Loss of tokens 1.. by transformers and torch's cross entropy, in float64."""
    with torch.no_grad():
        logits = oracle(torch.from_numpy(tokens)[None]).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, torch.from_numpy(tokens[1:]), reduction="none").numpy()


def test_one_window_is_transformers(decoder, oracle):
    tokens = text(100)
    scores = score(decoder, tokens, window=100)
    assert scores.num_scored == 99 and not scores.scored[0]
    np.testing.assert_allclose(scores.loss[1:], their_losses(oracle, tokens), atol=2e-5)
    assert perplexity(decoder, tokens) == pytest.approx(math.exp(their_losses(oracle, tokens).mean()), rel=1e-5)


def test_documents_do_not_see_each_other(decoder, oracle):
    starts = np.array([0, 17, 18, 60, 90])
    tokens = text(90)
    scores = score(decoder, tokens, starts, window=64, batch_tokens=100)
    for begin, end in itertools.pairwise(starts):
        if end - begin > 1:
            np.testing.assert_allclose(scores.loss[begin + 1 : end], their_losses(oracle, tokens[begin:end]), atol=2e-5)
    assert scores.num_scored == 90 - 4


def test_stride_is_the_sliding_window_of_transformers(decoder, oracle):
    """The published recipe: each window of w scores only what the one before it did not."""
    tokens, window, stride = text(61), 24, 10
    scores = score(decoder, tokens, window=window, stride=stride, join="stream")
    expected, done = np.zeros(61), 0
    for begin in range(0, 60, stride):
        part = their_losses(oracle, tokens[begin : min(begin + window + 1, 61)])
        for offset, loss in enumerate(part):
            token = begin + 1 + offset
            if token > done:
                expected[token] = loss
        done = begin + len(part)
        if done == 60:
            break
    np.testing.assert_allclose(scores.loss[1:], expected[1:], atol=2e-5)


def test_batches_change_nothing_that_matters(decoder):
    starts = np.array([0, 30, 31, 80, 200])
    tokens = text(200)
    one = score(decoder, tokens, starts, window=32, batch_tokens=1)
    many = score(decoder, tokens, starts, window=32, batch_tokens=10_000)
    np.testing.assert_allclose(one.loss, many.loss, atol=2e-5)
    again = score(decoder, tokens, starts, window=32, batch_tokens=10_000)
    assert (again.loss == many.loss).all()


def test_chunks_of_logits_change_nothing(decoder, monkeypatch):
    tokens = text(150)
    whole = score(decoder, tokens, window=64, reference=decoder)
    monkeypatch.setattr("hone.eval.score.LOGITS", decoder.config.vocab_size * 7)
    parts = score(decoder, tokens, window=64, reference=decoder)
    np.testing.assert_allclose(parts.loss, whole.loss, atol=1e-5)
    assert parts.mean_kl == 0.0


def test_a_model_does_not_differ_from_itself(decoder):
    scores = score(decoder, text(200), window=64, reference=decoder)
    assert scores.mean_kl == 0.0 and scores.top1_agreement == 1.0


def test_divergence_from_another_model(decoder, oracle):
    other = hone.model.decoder.build(decoder.config, seed=5)
    tokens = text(80)
    scores = score(other, tokens, window=80, reference=decoder)
    with torch.no_grad():
        theirs = oracle(torch.from_numpy(tokens)[None]).logits[0, :-1].double().log_softmax(-1)
        ours = other(torch.from_numpy(tokens)[None])[0, :-1].double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(scores.kl[1:], expected.numpy(), rtol=1e-4, atol=1e-5)
    same = (ours.argmax(-1) == theirs.argmax(-1)).numpy()
    assert scores.top1_agreement == pytest.approx(same.mean())
    targets = torch.from_numpy(tokens[1:])[:, None]
    above = (theirs - ours).gather(1, targets).mean().item()
    assert scores.mean_difference == pytest.approx(above, rel=1e-3, abs=1e-4)


def test_intervals_are_over_documents(decoder):
    """Their means of three documents of one size are three independent values."""
    from hone.base.interval import half_width

    other, tokens, starts = hone.model.decoder.build(decoder.config, seed=5), text(60), np.array([0, 20, 40, 60])
    scores = score(other, tokens, starts, window=32, reference=decoder)
    halves = {name: one.half_width for name, one in scores.intervals(starts).items()}
    assert {one.n for one in scores.intervals(starts).values()} == {len(starts) - 1}
    for name, values in (("kl", scores.kl), ("loss", scores.loss - scores.reference_loss)):
        means = [float(values[start + 1 : start + 20].mean(dtype="float64")) for start in starts[:-1]]
        assert halves[name] == pytest.approx(half_width(means), rel=1e-4, abs=1e-6)
    assert score(other, tokens, reference=decoder, window=64).intervals(np.array([0, 60])) == {"kl": None, "loss": None}


def test_divergence_on_paper():
    """P = (1/4, 3/4), Q = (1/2, 1/2): KL = 1/4 ln 1/2 + 3/4 ln 3/2."""
    expected = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64).log()
    model = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).log() + 3.0
    found = divergence(expected, model)
    assert found[0].item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-12)
    assert found[1].item() == pytest.approx(0.0, abs=1e-15)
    assert agreement(expected, model).tolist() == [False, True]  # ties go to the lower id


def test_bits_per_byte_on_paper():
    """Three scored tokens of ln 2 nats, 1 bit each, that stand for 2, 4 and 0 bytes: 3 bits over 6 bytes."""
    from hone.eval.score import Scores

    scored = np.array([False, True, True, True])
    loss = np.array([0, math.log(2), math.log(2), math.log(2)], np.float32)
    scores = Scores(scored, loss)
    assert scores.bits_per_byte(np.array([9, 2, 4, 0])) == pytest.approx(0.5)
    assert scores.perplexity == pytest.approx(2.0)
    assert scores.bits_per_byte(np.array([9, 0, 0, 0])) is None


def test_perplexity_of_uniform_predictions_is_the_vocabulary(decoder):
    flat = hone.model.decoder.build(decoder.config, seed=1)
    with torch.no_grad():
        flat.embedding.zero_()
    assert perplexity(flat, text(50)) == pytest.approx(float(decoder.config.vocab_size), rel=1e-5)


def test_one_token_is_a_users_mistake(decoder):
    with pytest.raises(SpecError, match="nothing to predict"):
        perplexity(decoder, [3])
