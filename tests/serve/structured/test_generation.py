"""Outputs of a random model match their schema, expression, choice or grammar, whatever the logits and the batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.serve.engine import Engine
from hone.serve.request import Output, Request, SamplingParams
from hone.serve.spec import EngineSpec
from hone.serve.structured import admission
from hone.serve.structured.spec import StructuredOutputs
from tests.serve.small import assert_all_free, drain, poison_freed_pages, tokens_of

pytest.importorskip("llguidance")

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}


def opened(folder: Path, **spec: Any) -> Engine:
    sizes = {"block_size": 8, "num_pages": 400, "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_threads": 1}
    return Engine(folder, EngineSpec.read({**sizes, **spec}))


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    one = opened(tiny_llama, async_scheduling=request.param)
    yield one
    assert_all_free(one)


def form(**fields: Any) -> StructuredOutputs:
    return StructuredOutputs.read({"disable_any_whitespace": True, **fields})


def params(spec: StructuredOutputs | None, seed: int = 0, max_tokens: int = 300, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=spec, **{"temperature": 3.0, **more})


def text_of(outputs: list[Output]) -> str:
    assert outputs[-1].finish != "error", outputs[-1].error
    return "".join(output.text for output in outputs)


SCHEMAS: list[Any] = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"const": "x\ny"}, {"type": "integer", "minimum": -5, "maximum": 5}]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "prefixItems": [{"enum": [1, 2]}, {"type": "null"}],
                                               "items": False, "minItems": 2}}},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"],
     "additionalProperties": False},
]  # fmt: skip


def test_json_matches_its_schema(engine: Engine) -> None:
    asked: dict[str, Any] = {}
    for place, schema in enumerate(SCHEMAS):
        for heat in (0.0, 1.0, 5.0):
            for seed in range(3):
                name = f"schema {place}, {heat}, {seed}"
                asked[name] = schema
                spec = form(json_schema=schema)
                engine.add(Request(name, [5, 6, 7 + seed], params(spec, seed, temperature=heat)))
    found = drain(engine)
    assert set(found) == set(asked)
    for name, outputs in found.items():
        assert outputs[-1].finish == "stop", name
        jsonschema.validate(json.loads(text_of(outputs)), asked[name])


def test_blanks_are_as_the_request_says(engine: Engine) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 2}
    blanks = dict.fromkeys(engine.tokenizer.encode(" \n"), 50.0)
    for name, more in {
        "default": {},
        "none": {"disable_any_whitespace": True},
        "own": {"whitespace_pattern": " ?"},
    }.items():
        spec = StructuredOutputs.read({"json_schema": schema, **more})
        engine.add(Request(name, [1], params(spec, 1, logit_bias=blanks)))
    texts = {name: text_of(outputs) for name, outputs in drain(engine).items()}
    assert texts["none"] == "[null,null]" and texts["own"] == "[ null , null ]"
    assert json.loads(texts["default"]) == [None, None] and 40 < len(texts["default"]) <= 11 + 4 * 40


def schemas() -> st.SearchStrategy[Any]:
    """Schemas whose every value is short, so that no output reaches its limit of tokens."""
    leaf = st.one_of(
        st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, *[st.integers(-999, 999)] * 2),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
        st.just({"type": "boolean"}),
        st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(["x", 'q"', "ü", 1, None, 2.5]), min_size=1, unique_by=repr)),
    )  # fmt: skip
    names = st.sampled_from(["a", "b c", "é", '"'])

    def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        fields = st.dictionaries(names, inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(lambda one, n: {"type": "array", "items": one, "maxItems": n}, inner, st.integers(0, 3)),
            st.builds(lambda all_, n: {"type": "object", "properties": all_, "required": sorted(all_)[:n],
                                       "additionalProperties": False}, fields, st.integers(0, 3)),
        )  # fmt: skip

    return st.recursive(leaf, wider, max_leaves=5)


@settings(max_examples=10, deadline=None)
@given(st.lists(schemas(), min_size=1, max_size=6), st.integers(0, 1000))
def test_any_schema(engine: Engine, drawn: list[Any], seed: int) -> None:
    for place, schema in enumerate(drawn):
        spec = form(json_schema=json.dumps(schema))
        engine.add(Request(str(place), [(seed + place) % 300], params(spec, seed, max_tokens=480)))
    found = drain(engine)
    for place, schema in enumerate(drawn):
        outputs = found[str(place)]
        assert outputs[-1].finish == "stop"
        jsonschema.validate(json.loads(text_of(outputs)), schema)


def test_the_other_kinds(engine: Engine) -> None:
    lark = 'start: "f(" arg ("," arg)? ")"\narg: /[0-9]{1,3}/ | "g(" arg ")"'
    gbnf = 'root ::= "<" [ab]{1,4} ">"'
    cases = {
        "regex": (form(regex=r"[a-f]{2,5}-\d+(\.\d)?z"), r"[a-f]{2,5}-\d+(\.\d)?z"),
        "choice": (form(choice=("yes", "no", 'per"haps\n')), r'yes|no|per"haps\n'),
        "lark": (form(grammar=lark), r"f\((g\()*\d{1,3}\)*(,(g\()*\d{1,3}\)*)?\)"),
        "gbnf": (form(grammar=gbnf), "<[ab]{1,4}>"),
        "object": (form(json_object=True), r"(?s)\{.*\}"),
    }
    for name, (spec, _) in cases.items():
        for seed in range(3):
            engine.add(Request(f"{name}-{seed}", [9, seed], params(spec, seed, 200)))
    found = drain(engine)
    assert len(found) == 15
    for name, outputs in found.items():
        text = text_of(outputs)
        if outputs[-1].finish == "stop":
            assert re.fullmatch(cases[name.split("-")[0]][1], text), (name, text)
        else:  # only these have no longest output
            assert name.split("-")[0] in ("regex", "lark", "object") and len(tokens_of(outputs)) == 200


def test_sequences_without_a_grammar_are_unchanged(tiny_llama: Path) -> None:
    plain = [params(None, seed, 30, temperature=heat, logprobs=2) for seed, heat in ((1, 0.0), (2, 1.0), (3, 2.0))]
    alone = opened(tiny_llama)
    for place, one in enumerate(plain):
        alone.add(Request(f"p{place}", [3, 4, place], one))
    before = drain(alone)
    mixed = opened(tiny_llama)
    for place, one in enumerate(plain):
        mixed.add(Request(f"p{place}", [3, 4, place], one))
        mixed.add(Request(f"g{place}", [3, 4, place], params(form(json_schema=json.dumps(PERSON)), place)))
    after = drain(mixed)
    for place in range(3):
        name = f"p{place}"
        assert tokens_of(after[name]) == tokens_of(before[name])
        jsonschema.validate(json.loads(text_of(after[f"g{place}"])), PERSON)
    assert_all_free(mixed)


def test_batch_and_preemption_change_nothing(tiny_llama: Path) -> None:
    spec = form(json_schema=json.dumps(PERSON))
    wanted = {}
    for seed in range(4):
        one = opened(tiny_llama)
        one.add(Request(str(seed), [7, seed], params(spec, seed)))
        wanted |= drain(one)
    tight = opened(tiny_llama, num_pages=16)
    poison_freed_pages(tight)
    for seed in range(4):
        tight.add(Request(str(seed), [7, seed], params(spec, seed)))
    found = drain(tight)
    assert tight.stats()["preemptions"] > 0
    assert {name: tokens_of(one) for name, one in found.items()} == {
        name: tokens_of(one) for name, one in wanted.items()
    }


def test_the_end_is_where_the_grammar_allows_it(engine: Engine) -> None:
    eos = next(iter(engine.eos_ids))
    digits = form(regex="[0-9]{1,6}")
    wants_end = {eos: 100.0}
    engine.add(Request("free", [1], params(digits, 1, logit_bias=wants_end)))
    engine.add(Request("least", [1], params(digits, 1, logit_bias=wants_end, min_tokens=4)))
    engine.add(Request("on", [1], params(digits, 1, logit_bias=wants_end, ignore_eos=True)))
    engine.add(Request("past", [1], params(digits, 1, logit_bias=wants_end, min_tokens=50)))
    engine.add(Request("stop", [1], params(form(regex="[0-9]{6}"), 1, stop=("1", "2", "3", "4", "5", "6"))))
    engine.add(Request("short", [1], params(form(regex="[0-9]{6}"), 1, 3)))
    found = drain(engine)
    texts = {name: text_of(outputs) for name, outputs in found.items()}
    assert len(texts["free"]) == 1 and tokens_of(found["free"])[-1] == eos
    assert len(tokens_of(found["least"])) == 5 and tokens_of(found["least"])[-1] == eos
    for name in ("on", "past"):  # the end is banned, so the grammar is completed instead
        assert len(texts[name]) == 6 and found[name][-1].finish == "stop" and eos not in tokens_of(found[name])
    assert found["stop"][-1].stop_reason in set("123456")
    assert found["short"][-1].finish == "length" and len(texts["short"]) == 3


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    engine.add(Request("g", [5, 6], params(form(regex="[xyz]{5}"), 3, logprobs=3)))
    (outputs,) = drain(engine).values()
    tokens, scored = tokens_of(outputs), [one for output in outputs for one in output.logprobs]
    with torch.inference_mode():
        raw = engine.model(torch.tensor([[5, 6, *tokens]]))[0].float().log_softmax(-1)
    for place, (token, one) in enumerate(zip(tokens, scored, strict=True)):
        assert one.token == token and one.logprob == pytest.approx(float(raw[1 + place, token]), abs=1e-4)
        assert one.top[0][0] == int(raw[1 + place].argmax())


def test_a_grammar_may_begin_later(engine: Engine) -> None:
    mark = engine.tokenizer.encode("the")
    spec = StructuredOutputs(regex="[0-9]{3}", begin_after=tuple(mark))
    bias = dict.fromkeys(mark, 2.0)
    engine.add(Request("r", [1, 2], params(spec, 4, 400, temperature=1.0, logit_bias=bias)))
    (outputs,) = drain(engine).values()
    before, _, after = text_of(outputs).partition("the")
    assert outputs[-1].finish == "stop" and re.fullmatch("[0-9]{3}", after) and before


def test_wrong_grammars_end_their_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the thread that compiles was faster than the one that adds."""
    errors = {}
    for name, spec in {
        "not": form(json_schema='{"not": {}}'),
        "regex": form(regex="(a"),
        "lark": form(grammar="start: nothing"),
        "right": form(regex="ab"),
    }.items():
        try:
            engine.add(Request(name, [1], params(spec)))
        except SpecError as error:
            errors[name] = error.what
    found = drain(engine)
    errors |= {name: outputs[-1].error for name, outputs in found.items() if outputs[-1].finish == "error"}
    assert errors.keys() == {"not", "regex", "lark"}
    assert "not" in errors["not"] and "unclosed" in errors["regex"]
    assert text_of(found["right"]) == "ab"
    engine.add(Request("none", [1], params(form(regex="ab"), allowed_token_ids=(3,))))
    ((last,),) = drain(engine).values()
    assert last.finish == "error" and "leave no token" in last.error
    with pytest.raises(SpecError, match="unclosed"):  # known by now
        engine.add(Request("again", [1], params(form(regex="(a"))))
    monkeypatch.setattr(admission, "DEADLINE_S", -1.0)
    monkeypatch.setattr(admission, "_WAIT_S", 0.0)
    engine.add(Request("late", [1], params(form(regex="(abc){5}"))))
    engine.add(Request("gone", [1], params(form(regex="(abc){6}"))))
    engine.abort("gone")
    found = drain(engine)
    assert found["gone"][-1].finish == "abort"
    assert found["late"][-1].finish == "stop" or "within" in found["late"][-1].error


def test_allowed_tokens_and_bad_words(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    allowed = tuple(tokenizer.encode("abcdef"))
    engine.add(Request("allowed", [1], params(None, 1, 60, allowed_token_ids=allowed, ignore_eos=True)))
    (outputs,) = drain(engine).values()
    assert set(tokens_of(outputs)) <= set(allowed)
    letters = tuple(tokenizer.core.token_to_id(one) for one in "ab")
    words = ("aa", "bbb")
    for name, bad in (("all", ()), ("some", words)):
        engine.add(Request(name, [1], params(None, 1, 80, allowed_token_ids=letters, bad_words=bad)))
    found = drain(engine)
    assert any(word in text_of(found["all"]) for word in words)
    assert not any(word in text_of(found["some"]) for word in words)
    with pytest.raises(SpecError, match="allowed_token_ids holds token 999"):
        engine.add(Request("far", [1], params(None, allowed_token_ids=(999,))))
    with pytest.raises(SpecError, match="empty"):
        engine.add(Request("no", [1], params(None, allowed_token_ids=())))


def test_speculation_leaves_them_alone(tiny_llama: Path) -> None:
    spec = form(json_schema=json.dumps(PERSON))
    texts = []
    for drafter in (None, {"kind": "prompt_lookup"}):
        one = opened(tiny_llama, drafter=drafter)
        for seed in range(2):
            one.add(Request(f"g{seed}", [7, 8, 7, 8], params(spec, seed)))
        one.add(Request("p", [7, 8, 7, 8], params(None, 0, 40, temperature=0.0)))
        found = drain(one)
        texts.append({name: text_of(outputs) for name, outputs in found.items()})
        assert (one.stats()["draft_tokens"] > 0) == (drafter is not None)
    assert texts[0] == texts[1]
