"""The engine against dense forward passes and transformers: same tokens under any load, nothing leaks, no one drags others down."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import FitError, SpecError
from hone.serve.engine import BusyError, Engine, EngineSpec
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
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(1, 4 + 5 * i)] for i in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [
    {},
    {"max_num_batched_tokens": 8},
    {"block_size": 1},
    {"block_size": 16, "enable_prefix_caching": False},
    {"batching": "static", "max_num_seqs": 2},
])  # fmt: skip
def test_greedy_tokens_equal_dense_forward_passes(spec):
    one = engine(MODEL, **spec)
    poison_freed_pages(one)
    done = one.generate(PROMPTS, greedy(20))
    for prompt, completion in zip(PROMPTS, done):
        assert completion.tokens == dense_greedy(MODEL, prompt, 20)
        assert completion.finish == "length"
    assert_all_free(one)


def test_a_second_run_reuses_cached_pages_and_gives_the_same_tokens():
    one = engine(MODEL)
    prompt = PROMPTS[4]
    first, second = one.generate([prompt], greedy())[0], one.generate([prompt], greedy())[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert first.tokens == second.tokens == dense_greedy(MODEL, prompt, 16)
    continued = prompt + first.tokens
    third = one.generate([continued], greedy())[0]
    assert third.num_cached_tokens == (len(continued) - 1) // 4 * 4
    assert third.tokens == dense_greedy(MODEL, continued, 16)


def test_salt_keeps_prefixes_apart():
    one = engine(MODEL)
    for number, salt in enumerate(["a", "b", "a"]):
        one.add(request(str(number), PROMPTS[4], greedy(2), salt=salt))
        outputs = drain(one)[str(number)]
        assert (outputs[-1].num_cached_tokens > 0) == (number == 2)


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_any_arrivals_aborts_and_priorities_in_a_tiny_pool(data):
    """Random requests over 14 pages of 3 tokens: preemption, prefix hits and aborts at any moment change no token."""
    one = engine(
        MODEL, block_size=3, num_pages=14, max_num_seqs=4, max_num_batched_tokens=data.draw(st.sampled_from([4, 7, 32]))
    )
    poison_freed_pages(one)
    stems = [[5, 9, 13, 2, 8, 1, 7], [5, 9, 13, 40, 41], [33]]
    wanted, found, aborted = {}, {}, set()
    for number in range(data.draw(st.integers(2, 8))):
        stem = data.draw(st.sampled_from(stems))
        prompt = stem + data.draw(st.lists(st.integers(1, 5), max_size=9))
        count = data.draw(st.integers(1, 14))
        wanted[str(number)] = (prompt, count)
        one.add(request(str(number), prompt, greedy(count), priority=data.draw(st.integers(0, 2))))
        for _ in range(data.draw(st.integers(0, 3))):
            for output in one.step():
                found.setdefault(output.request_id, []).append(output)
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(wanted)))
            if name in one._seqs:
                aborted.add(name)
            one.abort(name)
        one.pool.check()
    for name, outputs in drain(one).items():
        found.setdefault(name, []).extend(outputs)
    for name, (prompt, count) in wanted.items():
        expected = dense_greedy(MODEL, prompt, count)
        tokens = tokens_of(found[name])
        assert [output.finish for output in found[name][:-1]] == [None] * (len(found[name]) - 1)
        assert found[name][-1].finish == ("abort" if name in aborted else "length")
        assert tokens == expected[: len(tokens)] if name in aborted else tokens == expected
    assert_all_free(one)


def test_preemption_happens_and_changes_nothing():
    one = engine(MODEL, num_pages=12, max_num_seqs=4, enable_prefix_caching=False)
    poison_freed_pages(one)
    prompts = [PROMPTS[1][:6], PROMPTS[2][:6], PROMPTS[3][:6], PROMPTS[4][:6]]
    done = one.generate(prompts, greedy(24))
    assert one.stats()["preemptions"] > 0
    for prompt, completion in zip(prompts, done):
        assert completion.tokens == dense_greedy(MODEL, prompt, 24)
    assert_all_free(one)


def _hf_pair(tmp_path, family: str, **more):
    """A random transformers model and hone's engine over its saved folder."""
    import transformers

    torch.manual_seed(3)
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
        bos_token_id=None, pad_token_id=None, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), [
    ("Llama", {}),
    ("Mistral", {"sliding_window": 24}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
])  # fmt: skip
def test_64_greedy_tokens_equal_transformers(tmp_path, family, more):
    """Chunked prefill (budget 16, prompts up to 70), mixed with decode, and a second round from the prefix cache."""
    model = _hf_pair(tmp_path, family, **more)
    one = Engine(tmp_path, EngineSpec(block_size=8, num_pages=120, max_num_seqs=4, max_num_batched_tokens=16))
    shared = [(11 * i) % 97 for i in range(40)]
    prompts = [shared + [i, 2 * i, 5] * (10 * (i % 2) + 1) for i in range(1, 4)] + [[8]]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=64, do_sample=False, attention_mask=torch.ones_like(ids))
        expected.append(out[0, len(prompt) :].tolist())
    for round_ in range(2):
        done = one.generate(prompts, greedy(64))
        assert [completion.tokens for completion in done] == expected
        assert (done[0].num_cached_tokens > 0) == (round_ == 1)
    assert_all_free(one)


def test_a_long_prompt_does_not_hold_up_others():
    """Decoding sequences get their token every step, and short prompts come in while the long one is read in chunks."""
    one = engine(MODEL, num_pages=64, max_num_batched_tokens=12)
    one.add(request("decoding", [1, 2, 3], greedy(30)))
    one.step()
    one.add(request("long", [4] * 90, greedy(2)))
    one.add(request("short", [5, 6, 7], greedy(2)))
    steps = []
    while one.has_work:
        steps.append({output.request_id for output in one.step() if output.tokens})
    until_long = next(number for number, names in enumerate(steps) if "long" in names)
    assert until_long >= 6
    assert all("decoding" in names for names in steps[:until_long])
    assert any("short" in names for names in steps[:2])


def test_static_batching_admits_no_one_into_a_running_batch():
    one = engine(MODEL, batching="static", max_num_seqs=2)
    for number, count in enumerate([3, 9, 2]):
        one.add(request(str(number), [number + 1], greedy(count)))
    names = []
    while one.has_work:
        names.append({output.request_id for output in one.step()})
    assert all("2" not in step for step in names[:9]) and "2" in names[9]


def test_priority_goes_first():
    one = engine(MODEL, max_num_seqs=1)
    for name, priority in [("late", 5), ("first", 0), ("middle", 1)]:
        one.add(request(name, [3, 4], greedy(2), priority=priority))
    order = []
    while one.has_work:
        order += [output.request_id for output in one.step() if output.finish]
    assert order == ["first", "middle", "late"]


def test_one_broken_request_leaves_the_others_alone(monkeypatch):
    one = engine(MODEL)
    poison_freed_pages(one)
    for name in ("good", "bad", "fine"):
        one.add(request(name, PROMPTS[2], greedy(8)))
    one.step()
    bad = one._seqs["bad"]
    monkeypatch.setattr(bad, "sampling", None)  # what a bug in one request's own state looks like
    found = drain(one)
    assert found["bad"][-1].finish == "error" and found["bad"][-1].error
    for name in ("good", "fine"):
        assert found[name][-1].finish == "length"
        assert tokens_of(found[name]) == dense_greedy(MODEL, PROMPTS[2], 8)[-len(tokens_of(found[name])) :]
    assert_all_free(one)


def test_nan_logits_end_only_their_request_and_its_pages_leave_the_prefix_cache():
    model = decoder(1)
    with torch.no_grad():
        model.embedding[7] = math.nan  # the tied head makes every sequence's logit of token 7 NaN otherwise
    model.lm_head = torch.nn.Linear(32, VOCAB, bias=False).requires_grad_(False)
    one = engine(model)
    bad, good = [5, 6, 7, 8, 9, 10], [5, 6, 1, 8, 9, 10]
    one.add(request("bad", bad, greedy(4)))
    one.add(request("good", good, greedy(4)))
    found = drain(one)
    assert found["bad"][-1].finish == "error" and "finite" in found["bad"][-1].error
    assert found["good"][-1].finish == "length"
    assert one.pool.match([5, 6, 7, 8, 9]) == []
    fresh = engine(model)
    again = one.generate([[*good, 3]], greedy(4))[0]  # runs in pages that held NaN
    assert again.tokens == fresh.generate([[*good, 3]], greedy(4))[0].tokens
    assert_all_free(one)


def test_a_failing_forward_pass_ends_only_the_requests_that_cause_it(monkeypatch):
    one = engine(MODEL)
    real = one.runner.model.hidden

    def hidden(tokens, context):
        if (tokens == 60).any():
            raise RuntimeError("evil forward")
        return real(tokens, context)

    monkeypatch.setattr(one.runner.model, "hidden", hidden)
    one.add(request("evil", [1, 2, 60], greedy(4)))
    one.add(request("good", [1, 2, 3], greedy(1)))
    found = drain(one)
    assert found["evil"][-1].finish == "error" and "evil forward" in found["evil"][-1].error
    assert tokens_of(found["good"]) == dense_greedy(MODEL, [1, 2, 3], 1)
    assert_all_free(one)


def test_impossible_requests_are_refused():
    one = engine(MODEL, num_pages=4, max_waiting=2)
    assert one.max_model_len == 16
    with pytest.raises(FitError, match="maximum context length is 16"):
        one.add(request("a", [1] * 16, greedy()))
    with pytest.raises(SpecError, match="no tokens"):
        one.add(request("a", [], greedy()))
    with pytest.raises(SpecError, match="token 61"):
        one.add(request("a", [61], greedy()))
    with pytest.raises(SpecError, match="logit_bias"):
        one.add(request("a", [1], greedy(logit_bias={-1: 3.0})))
    with pytest.raises(SpecError, match="tokenizer"):
        one.add(request("a", [1], greedy(stop=("x",))))
    one.add(request("a", [1], greedy()))
    with pytest.raises(SpecError, match="own id"):
        one.add(request("a", [1], greedy()))
    one.add(request("b", [1], greedy()))
    with pytest.raises(BusyError):
        one.add(request("c", [1], greedy()))
    drain(one)
    assert_all_free(one)


def test_output_ends_at_the_context_length():
    one = engine(MODEL, num_pages=4)
    done = one.generate([[1] * 10], greedy(50))[0]
    assert len(done.tokens) == 6 and done.finish == "length"
    assert done.tokens == dense_greedy(MODEL, [1] * 10, 6)


def test_stop_tokens_eos_and_min_tokens():
    one = engine(MODEL)
    plain = dense_greedy(MODEL, PROMPTS[2], 12)
    stop = plain[4]
    until = plain[: plain.index(stop) + 1]
    done = one.generate([PROMPTS[2]], greedy(12, stop_token_ids=(stop,)))[0]
    assert (done.tokens, done.finish, done.stop_reason) == (until, "stop", stop)
    one.eos_ids = frozenset({stop})
    ended = one.generate([PROMPTS[2]], SamplingParams(max_tokens=12, temperature=0))[0]
    assert (ended.tokens, ended.finish, ended.stop_reason) == (until, "stop", None)
    longer = one.generate([PROMPTS[2]], SamplingParams(max_tokens=12, temperature=0, min_tokens=9))[0]
    assert len(longer.tokens) >= 9 and stop not in longer.tokens[:9]


def test_scoring_a_prompt_gives_every_token_its_logprob():
    one = engine(MODEL, max_num_batched_tokens=8)
    prompt = PROMPTS[4]
    one.generate([prompt], greedy(1))  # a cached prefix must not swallow positions
    params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=2, logprobs=1)
    done = one.generate([prompt, prompt], params)[1]
    assert done.tokens == [] and done.finish == "length"
    expected = MODEL(torch.tensor([prompt]))[0].log_softmax(-1)
    assert done.prompt_logprobs[0] is None and len(done.prompt_logprobs) == len(prompt)
    for place, found in enumerate(done.prompt_logprobs[1:], 1):
        assert found.token == prompt[place]
        assert found.logprob == pytest.approx(float(expected[place - 1, prompt[place]]), abs=1e-4)
        assert found.top[0][1] == pytest.approx(float(expected[place - 1].max()), abs=1e-4)


def test_logprobs_of_greedy_tokens_are_the_best_alternatives():
    done = engine(MODEL).generate([PROMPTS[3]], greedy(8, logprobs=3))[0]
    for token, found in zip(done.tokens, done.logprobs):
        assert found.token == token and len(found.top) == 3
        assert found.top[0] == (token, found.logprob)


def test_seeded_text_does_not_depend_on_the_batch():
    params = [SamplingParams(max_tokens=12, temperature=1.3, seed=number, ignore_eos=True) for number in range(4)]
    alone = [engine(MODEL).generate([prompt], one)[0].tokens for prompt, one in zip(PROMPTS, params)]
    together = engine(MODEL, max_num_batched_tokens=8).generate(PROMPTS[:4], params)
    assert [completion.tokens for completion in together] == alone
    tight = engine(MODEL, num_pages=14, enable_prefix_caching=False)
    assert [completion.tokens for completion in tight.generate(PROMPTS[:4], params)] == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_text_streams_and_stops(tiny_llama):
    one = Engine(tiny_llama, EngineSpec(num_pages=64, block_size=8))
    plain = one.generate(["the quick"], greedy(40))[0]
    assert plain.text == one.tokenizer.decode(plain.tokens)
    stop = plain.text[8:11]
    done = one.generate(["the quick"], greedy(40, stop=("never there", stop)))[0]
    assert done.text == plain.text[: plain.text.index(stop)]
    assert (done.finish, done.stop_reason) == ("stop", stop)
    kept = one.generate(["the quick"], greedy(40, stop=(stop,), include_stop=True))[0]
    assert kept.text == done.text + stop
    assert_all_free(one)


def test_threads_of_a_step_are_chosen_and_given_back(monkeypatch):
    before = torch.get_num_threads()
    seen = []
    for chosen in (None, 3):
        one = engine(MODEL, num_threads=chosen)
        real = one.runner.launch
        monkeypatch.setattr(
            one.runner, "launch", lambda work, real=real: seen.append(torch.get_num_threads()) or real(work)
        )
        one.generate([[1, 2]], greedy(1))
    assert seen == [1, 3]
    assert torch.get_num_threads() == before


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch):
    one = engine(MODEL)
    real, calls = one.step, []

    def step():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(one, "step", step)
    with pytest.raises(KeyboardInterrupt):
        one.generate(PROMPTS, greedy(8))
    assert_all_free(one)
    assert one.generate(PROMPTS[:1], greedy(8))[0].tokens == dense_greedy(MODEL, PROMPTS[0], 8)


@pytest.mark.parametrize("count", [3, 40])
def test_generate_loses_nothing_of_requests_queued_before(count):
    """One that ends while `generate` runs, and one that goes on after it: the next steps bring every token once."""
    one = engine(MODEL)
    one.add(request("queued", PROMPTS[2], greedy(count, logprobs=1, prompt_logprobs=1)))
    before = one.step()
    assert one.generate([PROMPTS[1]], greedy(8))[0].tokens == dense_greedy(MODEL, PROMPTS[1], 8)
    assert one.has_work
    first = one.step()
    assert [output.request_id for output in first] == ["queued"]
    outputs = [*before, *first, *drain(one).get("queued", [])]
    assert tokens_of(outputs) == dense_greedy(MODEL, PROMPTS[2], count)
    assert [row.token for output in outputs for row in output.logprobs] == tokens_of(outputs)
    assert sum(output.prompt_logprobs is not None for output in outputs) == 1
    assert [output.finish for output in outputs if output.finish] == ["length"]
    assert outputs[-1].num_output_tokens == count
    assert_all_free(one)


def test_an_interrupted_generate_loses_nothing_of_others(monkeypatch):
    one = engine(MODEL)
    one.add(request("queued", PROMPTS[2], greedy(12)))
    one.add(request("aborted", PROMPTS[0], greedy(40)))
    real, calls = one.runner.launch, []

    def run(work):
        calls.append(1)
        if len(calls) == 6:
            one.abort("aborted")
            raise KeyboardInterrupt
        return real(work)

    monkeypatch.setattr(one.runner, "launch", run)
    with pytest.raises(KeyboardInterrupt):
        one.generate(PROMPTS[:2], greedy(20))
    first = {output.request_id: output for output in one.step()}
    assert (
        set(first) == {"queued", "aborted"} and first["aborted"].finish == "abort" and len(first["aborted"].tokens) == 5
    )
    assert tokens_of([first["queued"], *drain(one)["queued"]]) == dense_greedy(MODEL, PROMPTS[2], 12)
    assert_all_free(one)


def test_a_request_may_take_the_name_of_one_that_ended_undelivered():
    one = engine(MODEL)
    one.add(request("same", PROMPTS[0], greedy(2)))
    one.generate([PROMPTS[1]], greedy(6))
    one.add(request("same", PROMPTS[3], greedy(3)))
    first, second = one.step()
    assert first.tokens == dense_greedy(MODEL, PROMPTS[0], 2) and first.finish == "length"
    assert tokens_of([second, *drain(one)["same"]]) == dense_greedy(MODEL, PROMPTS[3], 3)
