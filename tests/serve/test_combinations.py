"""Random mixes of requests and engines: whatever meets in a step, every request gets what it gets alone.

The oracle is a synchronous engine that serves one request at a time, with pages to spare and no prefix cache. The engine
under test has few pages (poisoned when they are freed), small steps, and any of the techniques that may go together.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers

from hone.model.decoder import Decoder
from hone.model.tokenizer import Tokenizer
from hone.serve.engine import Engine
from hone.serve.request import Output, Request, Retention, SamplingParams, TokenLogprob, joined
from hone.serve.structured.spec import StructuredOutputs
from tests.serve.small import assert_all_free, decoder, dense_greedy, engine, greedy, poison_freed_pages

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and an end."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    return Tokenizer(core, eos_ids=(EOS,))


TOKENIZER = byte_tokenizer()
SHAPE = {"vocab_size": EOS + 1, "intermediate_size": 32}
MODELS = {
    "layers": decoder(**SHAPE),
    "compiled": decoder(head_dim=32, **SHAPE),  # decode steps are one compiled call, where the CPU has AVX2
    "windowed": decoder(mixers=[{"kind": "sliding_window", "window": 9}, {"kind": "sliding_window", "window": 6}], **SHAPE),
}  # fmt: skip
DRAFT = decoder(5, num_layers=1, **SHAPE)
STEMS = [[40, 41, 42, 43, 44, 45, 46], [40, 41, 42, 43, 90, 91], [7], list(range(60, 76))]

KV_POLICIES: list[dict[str, Any]] = [
    {"kind": "streaming_llm", "sink_tokens": 3, "window": 8},
    {"kind": "snapkv", "budget": 9, "window": 1, "pooling": 3},
    {"kind": "snapkv", "budget": 10, "window": 4, "pooling": 1},
    {"kind": "h2o", "budget": 8, "heavy": 0.5, "interval": 1},
    {"kind": "h2o", "budget": 10, "heavy": 0.6, "interval": 4},
]
EVICTIONS = ["lru", "lfu", "slru", "fifo", "priority_duration"]
FORMS = [{"regex": "[a-f]{2,9}"}, {"json_schema": '{"type": "array", "items": {"enum": [1, "x"]}, "maxItems": 2}'}]


def drawn(dice: random.Random, count: int) -> dict[str, Any]:
    """Sampling parameters of one request: any feature beside any other."""
    found: dict[str, Any] = {"max_tokens": count, "seed": dice.randrange(1000)}
    found["temperature"] = dice.choice([0, 0, 0.9, 1.5])

    def maybe(chance: float, **more: Any) -> None:
        if dice.random() < chance:
            found.update(more)

    maybe(0.3, top_k=dice.choice([1, 5, 40]))
    maybe(0.3, top_p=0.8)
    maybe(0.2, min_p=0.05)
    maybe(0.3, presence_penalty=0.7, frequency_penalty=0.4)
    maybe(0.2, repetition_penalty=1.3)
    maybe(0.2, logit_bias={dice.randrange(EOS): 5.0, EOS: 3.0})
    maybe(0.3, min_tokens=dice.randrange(1, 6))
    maybe(0.4, stop_token_ids=tuple(dice.sample(range(EOS), 40)))
    maybe(0.3, stop=tuple(chr(one) for one in dice.sample(range(33, 127), 20)), include_stop=dice.random() < 0.5)
    maybe(0.3, ignore_eos=True)
    maybe(0.3, logprobs=dice.choice([0, 2]))
    maybe(0.2, prompt_logprobs=1)
    constrained = dice.random()
    if constrained < 0.2:
        found["allowed_token_ids"] = tuple(dice.sample(range(EOS), 60))
    elif constrained < 0.35:
        found["bad_words"] = ("a", "bc")
    elif constrained < 0.6:
        found["structured_outputs"] = StructuredOutputs.read(dice.choice(FORMS))
    return found


def requests_of(dice: random.Random, spec: dict[str, Any]) -> list[Request]:
    """Requests that share prefixes; some are copies of one prompt with other seeds, as `n` makes them."""
    found: list[Request] = []
    while len(found) < 7:
        prompt = dice.choice(STEMS) + [dice.randrange(60, 64) for _ in range(dice.randrange(9))]
        count = dice.randrange(13)
        fields = drawn(dice, count)
        more: dict[str, Any] = {"priority": dice.choice([0, 0, 0, 1, -1]), "salt": dice.choice(["", "", "x"])}
        if dice.random() < 0.2:
            more["pooling"] = dice.choice(["mean", "last"])
        if spec.get("eviction") == "priority_duration" and dice.random() < 0.5:
            more["retention"] = (Retention(start=2, end=dice.choice([None, 6]), priority=dice.choice([1, 90])),)
        for copy in range(dice.choice([1, 1, 3])):
            params = SamplingParams(**{**fields, "seed": fields["seed"] + copy})
            found.append(Request(str(len(found)), prompt, params, **more))
    return found


def spec_of(dice: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(model, what changes the text, what does not) of an engine."""
    name = dice.choice(list(MODELS))
    meant: dict[str, Any] = {"kv_cache_dtype": dice.choice(["auto", "auto", "auto", "fp8", "int8"])}
    free: dict[str, Any] = {
        "block_size": dice.choice([2, 3, 5]),
        "max_num_seqs": dice.choice([2, 4, 8]),
        "batching": dice.choice(["continuous", "continuous", "continuous", "static", "dynamic"]),
        "max_delay_s": 0.002,
        "enable_prefix_caching": dice.random() < 0.8,
        "eviction": dice.choice(EVICTIONS),
    }
    free["max_num_batched_tokens"] = free["max_num_seqs"] + dice.choice([0, 3, 30])
    free["num_pages"] = -(-dice.choice([36, 45, 70]) // free["block_size"])
    kind = dice.random()
    if kind < 0.35:
        policy = {"kind": "window"} if name == "windowed" else dice.choice(KV_POLICIES)
        meant["kv_policy"] = policy
        if policy["kind"] in ("snapkv", "h2o"):
            meant["kv_cache_dtype"] = "auto"
        if free["eviction"] == "priority_duration":
            free["eviction"] = "slru"
    elif kind < 0.6:
        free["drafter"] = {"kind": dice.choice(["prompt_lookup", "draft_model"]), "num_tokens": 3}
        free["drafter"] |= {"min_ngram": 1} if free["drafter"]["kind"] == "prompt_lookup" else {}
    free["async_scheduling"] = "drafter" not in free and dice.random() < 0.6
    return name, meant, free


def alone(model: Decoder, meant: dict[str, Any], requests: list[Request]) -> dict[str, Output]:
    """What each request gets from an engine that nobody else uses."""
    one = engine(model, tokenizer=TOKENIZER, num_pages=120, enable_prefix_caching=False, num_threads=1, **meant)
    found = {}
    for request in requests:
        one.add(replace(request, retention=(), priority=0))
        outputs: list[Output] = []
        while one.has_work:
            outputs += one.step()
        (found[request.id],) = joined(outputs)
    return found


def together(one: Engine, requests: list[Request], dice: random.Random) -> tuple[dict[str, Output], set[str]]:
    """What they get when they come at any time, and some leave; the names of these."""
    outputs: list[Output] = []
    left: set[str] = set()

    def step() -> None:
        outputs.extend(one.step())
        one.pool.check()

    for request in requests:
        one.add(request)
        for _ in range(dice.choice([0, 0, 1, 3])):
            step()
        if dice.random() < 0.12:
            name = dice.choice(list(one._seqs)) if one._seqs else request.id
            left |= {name} & set(one._seqs)
            one.abort(name)
    while one.has_work:
        step()
    return {output.request_id: output for output in joined(outputs)}, left


def same_scores(ours: list[TokenLogprob | None] | None, theirs: list[TokenLogprob | None] | None, bound: float) -> bool:
    if ours is None or theirs is None or len(ours) != len(theirs):
        return ours is theirs
    return all(
        one is other or (one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=bound))
        for one, other in zip(ours, theirs)
    )


def check(seed: int) -> Engine:
    """One mix on one engine, both drawn from `seed`."""
    dice = random.Random(seed)
    name, meant, free = spec_of(dice)
    requests = requests_of(dice, free)
    model = MODELS[name]
    drafter = free.get("drafter", {}).get("kind")
    one = engine(
        model, DRAFT if drafter == "draft_model" else None, tokenizer=TOKENIZER, num_threads=1, **meant, **free
    )
    fit = [one_request for one_request in requests if len(one_request.prompt) < one.max_model_len]
    requests = [
        replace(each, params=each.params.model_copy(update={"max_tokens": min(each.params.max_tokens, one.max_model_len - len(each.prompt))}))
        for each in fit
    ]  # fmt: skip
    poison_freed_pages(one)
    found, left = together(one, requests, dice)
    expected = alone(model, meant, requests)
    bound = 1e-3 if meant["kv_cache_dtype"] == "auto" else 3e-2  # rounding may go the other way
    what = f"seed {seed}: {name}, {meant}, {free}"
    for request in requests:
        got, wanted = found[request.id], expected[request.id]
        told = f"{what}, {request}"
        assert got.finish != "error", f"{got.error}; {told}"
        if request.id in left:
            assert got.finish == "abort", told
        # Draws of guessed tokens have the same distribution as others, not the same numbers.
        if drafter and request.params.temperature > 0:
            assert request.id in left or got.finish in ("stop", "length"), told
            continue
        count = len(got.tokens) if request.id in left else len(wanted.tokens)
        assert got.tokens == wanted.tokens[:count], told
        if request.id in left:
            continue
        assert (got.finish, got.stop_reason, got.text) == (wanted.finish, wanted.stop_reason, wanted.text), told
        assert same_scores(got.logprobs, wanted.logprobs, bound), told
        assert same_scores(got.prompt_logprobs, wanted.prompt_logprobs, bound), told
        assert (got.pooled is None) == (request.pooling is None), told
        if got.pooled is not None and wanted.pooled is not None:
            vectors = [np.frombuffer(each, dtype=np.float32) for each in (got.pooled, wanted.pooled)]
            np.testing.assert_allclose(*vectors, rtol=bound, atol=bound, err_msg=told)
    assert_all_free(one)
    return one


SEEDS = (47, 48, 49, 50, 51, 54, 56, 68, 70, 71, 74, 76)
"""Few that hold everything: the test below says what."""


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_get_the_same_output_alone_and_in_random_mixes(seed: int) -> None:
    pytest.importorskip("llguidance")
    check(seed)


def test_the_random_mixes_cover_what_they_are_for() -> None:
    """Among the seeds above are all models, policies, drafters, evictions and caches, with and without steps ahead."""
    specs = [spec_of(random.Random(seed)) for seed in SEEDS]
    seen = {(meant["kv_cache_dtype"], free["async_scheduling"]) for _, meant, free in specs}
    assert {(dtype, ahead) for dtype in ("auto", "fp8", "int8") for ahead in (False, True)} <= seen
    policies = {
        (meant["kv_policy"]["kind"], free["async_scheduling"]) for _, meant, free in specs if "kv_policy" in meant
    }
    assert {kind for kind, ahead in policies if ahead} == {"window", "streaming_llm", "snapkv", "h2o"}
    assert {free["drafter"]["kind"] for *_, free in specs if "drafter" in free} == {"prompt_lookup", "draft_model"}
    assert {(free["batching"], free["async_scheduling"]) for *_, free in specs} >= {
        (batching, True) for batching in ("continuous", "static", "dynamic")
    }
    assert {free["eviction"] for *_, free in specs} == set(EVICTIONS)
    assert {(name, meant["kv_cache_dtype"] == "auto") for name, meant, _ in specs} == {
        (name, plain) for name in MODELS for plain in (False, True)
    }


@pytest.mark.parametrize("policy", [
    {"kind": "snapkv", "budget": 6, "window": 1, "pooling": 1},
    {"kind": "h2o", "budget": 6, "interval": 1},
])  # fmt: skip
def test_a_compaction_that_observes_one_token_runs_layer_by_layer(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction that observes a single token sees its attention, also where decode steps are one compiled call."""
    prompt = [(7 * at) % EOS for at in range(20)]
    found = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr("hone.serve.paging.paged.compiled_step", lambda *_: None)
        one = engine(MODELS["compiled"], kv_policy=policy, num_threads=1)
        found.append(one.generate([prompt], greedy(12))[0].tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("draft", [None, DRAFT], ids=["prompt_lookup", "draft_model"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_guesses_after_a_prompts_last_token_are_no_part_of_it(draft: Decoder | None, pooling: str) -> None:
    """The last token of a prompt, alone in its step, may have guesses behind it: scores and embeddings end before them."""
    model, prompt = MODELS["layers"], [40, 41, 42, 43, 40, 41, 42, 43, 40]
    drafter = None if draft else {"kind": "prompt_lookup", "min_ngram": 1}
    found = []
    for spec in ({}, {"drafter": drafter} if drafter else {"draft": draft}):
        given = spec.pop("draft", None)
        one = engine(model, given, max_num_seqs=8, max_num_batched_tokens=8, num_threads=1, **spec)
        one.add(Request("a", prompt, greedy(6, prompt_logprobs=0), pooling=pooling))
        outputs: list[Output] = []
        while one.has_work:
            outputs += one.step()
        (output,) = joined(outputs)
        found.append(output)
        assert not spec or one.stats()["draft_tokens"] > 0
    plain, guessed = found
    assert guessed.tokens == plain.tokens
    assert len(guessed.prompt_logprobs or ()) == len(prompt)
    assert same_scores(guessed.prompt_logprobs, plain.prompt_logprobs, 1e-4)
    vectors = [np.frombuffer(each.pooled or b"", dtype=np.float32) for each in found]
    assert len(vectors[0]) == model.config.hidden_size
    np.testing.assert_allclose(*vectors, atol=1e-4)


def test_a_delay_may_end_while_a_step_is_scheduled() -> None:
    """Dynamic batching: nothing is scheduled because of the delay, which is over a moment later."""
    one = engine(MODELS["layers"], batching="dynamic", max_delay_s=5.0, max_num_seqs=4)
    times = iter([0.0, 4.0, *[6.0] * 100])
    one.scheduler._clock = lambda: next(times)
    one.add(Request("a", [1, 2, 3], greedy(2)))
    outputs: list[Output] = []
    while one.has_work:
        outputs += one.step()
    assert sum(len(output.tokens) for output in outputs) == 2


def test_grammars_that_are_compiled_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` queues no more than may wait, however long the compiler takes."""
    pytest.importorskip("llguidance")
    one = engine(MODELS["layers"], tokenizer=TOKENIZER, max_waiting=3, max_num_seqs=2)
    most, real = [], one.add

    def add(request: Request) -> None:
        real(request)
        most.append(one.stats()["waiting"])

    monkeypatch.setattr(one, "add", add)
    params = [
        SamplingParams(max_tokens=6, temperature=0, structured_outputs=StructuredOutputs.read({"regex": f"[{a}-z]{{3}}"}))
        for a in "abcdefgh"
    ]  # fmt: skip
    done = one.generate([[40, 41]] * len(params), params)
    assert [each.finish for each in done] == ["stop"] * len(params) and max(most) <= 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_output_is_recomputed_one_token_a_step(ahead: bool) -> None:
    """After a preemption, with one token of the budget left beside another sequence: each step reads its own token."""
    prompts = {"a": [40, 41, 42], "b": [50, 51]}
    spec = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "enable_prefix_caching": False}
    one = engine(MODELS["layers"], async_scheduling=ahead, **spec)
    for name, prompt in prompts.items():
        one.add(Request(name, prompt, greedy(14)))
    outputs: list[Output] = []
    for _ in range(9):
        outputs += one.step()
    one.scheduler.preempt(one._seqs["a"])
    while one.has_work:
        outputs += one.step()
    found = {output.request_id: output.tokens for output in joined(outputs)}
    assert found == {name: dense_greedy(MODELS["layers"], prompt, 14) for name, prompt in prompts.items()}


def test_a_step_whose_masks_fail_is_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs again in halves; the results of the step before are applied, and its tokens counted, a single time."""
    pytest.importorskip("llguidance")
    from hone.serve.structured import masks

    forms = [StructuredOutputs.read({"regex": f"[{first}-z]{{6}}"}) for first in "ak"]
    params = [SamplingParams(max_tokens=9, temperature=0, structured_outputs=form) for form in forms]
    params.append(greedy(9))
    prompts = [[40, 41, 42], [50, 51], [60, 61, 62, 63]]
    wanted = engine(MODELS["layers"], tokenizer=TOKENIZER).generate(prompts, params)
    real, calls = masks.ask_together, iter(range(100))

    def ask(*given: Any) -> set[int]:
        if next(calls) == 3:
            raise RuntimeError("no threads")
        return real(*given)

    monkeypatch.setattr(masks, "ask_together", ask)
    for ahead in (False, True):
        one = engine(MODELS["layers"], tokenizer=TOKENIZER, async_scheduling=ahead)
        found = one.generate(prompts, params)
        assert [(each.tokens, each.finish) for each in found] == [(each.tokens, each.finish) for each in wanted]
        calls = iter(range(100))
        assert_all_free(one)
