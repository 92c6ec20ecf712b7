"""Asynchronous scheduling: a step is launched before the tokens of the last one are read, and nobody can tell from the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import HoneError
from hone.serve.engine import Engine
from hone.serve.request import SamplingParams
from tests.serve.small import (
    VOCAB,
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
KINDS = {
    "greedy": lambda n: greedy(n),
    "scored": lambda n: greedy(n, prompt_logprobs=1, logprobs=2),
    "drawn": lambda n: SamplingParams(max_tokens=n, temperature=1.1, top_k=20, top_p=0.9, seed=n, ignore_eos=True),
    "penalized": lambda n: SamplingParams(
        max_tokens=n, temperature=0.9, seed=n, presence_penalty=1.0, frequency_penalty=0.3, repetition_penalty=1.2
    ),
    "stopped": lambda n: SamplingParams(max_tokens=n, temperature=0.8, seed=n, stop_token_ids=tuple(range(0, 60, 5))),
    "biased": lambda n: greedy(n, logit_bias={7: 4.0}, min_tokens=2, stop_token_ids=(7,)),
}


def texts(one: Engine, work: list[tuple[list[int], SamplingParams, int]]) -> dict[str, tuple]:
    """What every request got: tokens, log-probabilities, and why it ended."""
    found = {}
    for number, (prompt, params, waits) in enumerate(work):
        one.add(request(str(number), prompt, params, priority=number % 2))
        for _ in range(waits):
            for output in one.step():
                found.setdefault(output.request_id, []).append(output)
        one.pool.check()
    for name, outputs in drain(one).items():
        found.setdefault(name, []).extend(outputs)
    assert_all_free(one)
    return {
        name: (
            tokens_of(outputs),
            [score for output in outputs for score in output.logprobs],
            outputs[0].prompt_logprobs,
            outputs[-1].finish,
        )
        for name, outputs in found.items()
    }


@settings(max_examples=12, deadline=None)
@given(
    work=st.lists(
        st.tuples(
            st.lists(st.integers(1, 4), min_size=1, max_size=12),
            st.sampled_from(sorted(KINDS)),
            st.integers(1, 12),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=7,
    ),
    budget=st.sampled_from([4, 9, 32]),
    pages=st.sampled_from([12, 30]),
)
def test_async_and_synchronous_scheduling_give_the_same_tokens(work, budget, pages):
    """Every kind of sampling, ends that only the tokens tell, chunks, shared prefixes, preemption in a tiny pool."""
    each = [(prompt, KINDS[kind](count), waits) for prompt, kind, count, waits in work]
    sizes = {"block_size": 3, "num_pages": pages, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    found = []
    for ahead in (False, True):
        one = engine(MODEL, async_scheduling=ahead, **sizes)
        poison_freed_pages(one)
        found.append(texts(one, each))
    for name, (tokens, scores, prompt_scores, finish) in found[0].items():
        assert found[1][name][0] == tokens and found[1][name][3] == finish
        for ours, theirs in ((found[1][name][1], scores), (found[1][name][2] or [], prompt_scores or [])):
            assert len(ours) == len(theirs)
            for one, other in zip(ours, theirs):
                assert (one is None) == (other is None)
                assert one is None or (one.token, one.logprob) == (other.token, pytest.approx(other.logprob, abs=1e-4))


def test_a_step_is_launched_before_the_last_one_is_read():
    one = engine(MODEL, async_scheduling=True)
    events, real = [], one.runner.launch

    def launch(step):
        events.append("launch")
        launched = real(step)
        read = launched.tokens
        launched.tokens = lambda: events.append("read") or read()
        return launched

    one.runner.launch = launch
    done = one.generate([[5, 6, 7]], greedy(4))[0]
    assert done.tokens == dense_greedy(MODEL, [5, 6, 7], 4)
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]  # and none beyond the end


def test_an_unforeseen_end_costs_one_token_of_one_step():
    expected = dense_greedy(MODEL, [5, 6, 7], 12)
    stop = expected[5]
    one = engine(MODEL, async_scheduling=True)
    done = one.generate([[5, 6, 7]], SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,)))[0]
    count = expected.index(stop) + 1
    assert done.tokens == expected[:count] and done.finish == "stop"
    drain(one)
    assert one.stats()["steps"] == count + 1 and not one.has_work


def test_logits_that_are_not_finite_end_their_sequence_only():
    one = engine(MODEL, async_scheduling=True)
    real = one.runner.model.head

    def head(x):
        logits = real(x)
        if len(x) == 2 and one._num_steps == 4:
            logits[0] = float("nan")
        return logits

    one.runner.model.head = head
    broken, whole = one.generate([[1, 2, 3], [9, 8]], greedy(9))
    assert broken.finish == "error" and "finite" in broken.error and len(broken.tokens) == 3
    assert whole.tokens == dense_greedy(MODEL, [9, 8], 9)
    assert_all_free(one)


def test_async_scheduling_with_a_drafter_is_refused():
    with pytest.raises(HoneError, match="async_scheduling"):
        engine(MODEL, decoder(5, num_layers=1), async_scheduling=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_shared_prefix_is_computed_once_when_all_arrive_together(ahead):
    """The others wait for the first one's pages, then find all of them."""
    one = engine(MODEL, async_scheduling=ahead, block_size=4, num_pages=100, max_num_batched_tokens=64)
    prefix = [(5 * place) % 57 + 1 for place in range(40)]
    prompts = [[*prefix, number, number + 1] for number in range(5)]
    done = one.generate(prompts, greedy(6))
    assert [one.num_cached_tokens for one in done] == [0, 40, 40, 40, 40]
    assert one.stats()["prompt_tokens"] == 42 + 4 * 2
    for prompt, completion in zip(prompts, done):
        assert completion.tokens == dense_greedy(MODEL, prompt, 6)
    assert_all_free(one)


def test_sequences_that_wait_for_a_prefix_go_on_when_its_request_is_aborted():
    one = engine(MODEL, block_size=4, num_pages=100, max_num_batched_tokens=8)
    prefix = [(5 * place) % 57 + 1 for place in range(40)]
    for name in "abc":
        one.add(request(name, [*prefix, ord(name) % VOCAB], greedy(3)))
    one.step()
    one.abort("a")
    found = drain(one)
    for name in "bc":
        assert tokens_of(found[name]) == dense_greedy(MODEL, [*prefix, ord(name) % VOCAB], 3)
    assert_all_free(one)


def test_no_request_waits_for_a_prefix_when_pages_are_not_shared():
    one = engine(MODEL, enable_prefix_caching=False, max_num_batched_tokens=32)
    for name in "ab":
        one.add(request(name, [3] * 12, greedy(1)))
    assert {output.request_id for output in one.step()} == {"a", "b"}
    assert_all_free(one)
