"""Compilation of grammars: what is refused and how it is said, sources of each kind, vocabularies, and hostile input."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hone.base.errors import MissingExtra, SpecError
from hone.model.tokenizer import Tokenizer, load_tokenizer
from hone.serve.structured import constraint, grammars, masks
from hone.serve.structured.constraint import Constraint, mask_of
from hone.serve.structured.grammars import GrammarCheck, Grammars
from hone.serve.structured.spec import MOST_CHARS, MOST_GRAMMAR_CHARS, StructuredOutputs

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer(tiny_llama) -> Tokenizer:
    return load_tokenizer(tiny_llama)


def form(**fields) -> StructuredOutputs:
    return StructuredOutputs.read(fields)


def bits(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def open_(tokenizer: Tokenizer, spec: StructuredOutputs, vocab_size: int = 300, eos=(0,), **more) -> Constraint:
    one = Constraint(vocab_size, ends=eos, eos_ids=eos, **more)
    one.matcher = Grammars(tokenizer, vocab_size, eos).compile(spec).result().deep_copy()
    return one


def mask(one: Constraint) -> set[int]:
    row = np.zeros(one.num_words, dtype=np.int32)
    one.fill(row)
    return bits(row)


def test_a_spec_has_one_kind_of_bounded_size() -> None:
    for wrong, word in (
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "json_object and regex"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[]"}, "an object"),
        ({"json_schema": True}, "json_schema"),
        ({"json_schema": json.dumps({"description": "x" * MOST_CHARS})}, "at most"),
        ({"regex": ""}, "0 characters"),
        ({"grammar": "x" * (MOST_GRAMMAR_CHARS + 1)}, "characters"),
        ({"choice": ("a", "")}, "empty"),
        ({"choice": ("a" * MOST_CHARS, "b")}, "at most"),
    ):
        with pytest.raises(SpecError, match=word):
            form(**wrong)
    assert form(json_schema={"type": "null"}) == form(json_schema='{"type": "null"}')


def test_what_cannot_be_compiled_is_said(tokenizer: Tokenizer) -> None:
    check = GrammarCheck(tokenizer)
    for spec, word in (
        (form(json_schema={"type": "strin"}), "strin"),
        (form(json_schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (form(json_schema={"type": "string", "format": "no-format"}), "no-format"),
        (form(json_schema={"$ref": "https://example.org/other"}), "example.org"),
        (form(json_schema={"minimum": 2, "maximum": 1, "type": "integer"}), "minimum"),
        (form(regex="a{3,"), "unclosed"),
        (form(regex=r"(a)\1"), "backreferences"),
        (form(grammar="start: other"), "other"),
        (form(grammar='root ::= ("a"'), "GBNF"),
        (form(regex="(" * 10_000 + ")" * 10_000), "invalid regex"),
    ):
        with pytest.raises(SpecError, match=word) as caught:
            check(spec).result()
        assert len(str(caught.value)) < 500 and caught.value.fix
    for right in (
        form(json_schema={}),
        form(json_schema={"$ref": "#"}),
        form(regex='a/b\\/c\n"#\\d'),
        form(grammar='root ::= "a" [0-9]+ "b"'),
        form(grammar="start: <|endoftext|> /x/"),
        form(choice=("\\", '"', "\u2028")),
    ):
        check(right).result()


def test_deep_grammars_do_not_end_the_process() -> None:
    """A level of recursion for each rule: in a thread of the usual stack this is a segmentation fault."""
    count = 2400
    chain = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(count)) + f'\na{count}: "a"'
    refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(6000)} | {"d6000": {"type": "null"}}
    check = GrammarCheck(None)
    check(form(grammar=chain)).result()
    check(form(json_schema={"$ref": "#/$defs/d0", "$defs": refs})).result()


def test_masks_are_those_of_the_bytes(tokenizer: Tokenizer) -> None:
    one = open_(tokenizer, form(choice=("the cat", "the dog", "then")))
    spelled = {token: tokenizer.token_bytes(token) for token in range(300) if token not in tokenizer.special_ids}
    text = b""
    for _ in range(20):
        found = mask(one)
        if text in (b"the cat", b"the dog", b"then"):
            break
        wanted = {
            token
            for token, raw in spelled.items()
            if raw and any(end.startswith(text + raw) for end in (b"the cat", b"the dog", b"then"))
        }
        assert found <= wanted and found  # forced texts keep the tokenizer's own spelling
        assert {spelled[token][0] for token in found} == {spelled[token][0] for token in wanted}
        token = max(found)
        text += spelled[token]
        one.accept(token)
    assert one.is_done and found == {0}
    one = open_(tokenizer, form(regex="[a-z ]{1,30}"))
    legal = {
        token
        for token, raw in spelled.items()
        if raw and all(chr(byte) in "abcdefghijklmnopqrstuvwxyz " for byte in raw)
    }
    assert mask(one) == legal
    with pytest.raises(ArithmeticError, match="not in the mask"):
        one.accept(next(iter(set(spelled) - legal)))


def test_vocabularies_with_gaps_and_without_an_end(tokenizer: Tokenizer) -> None:
    digits = {token for token in range(300) if tokenizer.token_bytes(token).isdigit()}
    one = open_(tokenizer, form(regex="[0-9]{2}"), vocab_size=350)  # padded, as models are
    assert mask(one) == digits and one.num_words == 11
    one = open_(tokenizer, form(regex="[0-9]{2}"), vocab_size=320, eos=())
    for _ in range(2):
        assert mask(one) == digits
        one.accept(min(digits))
    assert one.is_done


def test_what_a_mask_combines(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.core.token_to_id(one) for one in "abc")
    one = open_(tokenizer, form(regex="[abc]{1,5}"), allowed=[a, b, 0], bad_words=[[a, b], [c]], min_tokens=2)
    assert mask(one) == {a, b}
    one.accept(a)
    assert mask(one) == {a}
    one.accept(a)
    assert mask(one) == {a, 0}
    assert bits(mask_of([0, 31, 32, 299], 300)) == {0, 31, 32, 299}
    for token in (31, 63, 5):
        free = Constraint(300, bad_words=[[token]])
        assert set(range(300)) - mask(free) == {token}


def test_a_slow_mask_is_an_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = open_(tokenizer, form(regex="a*"))
    monkeypatch.setattr(constraint, "MASK_S", -1.0)
    with pytest.raises(SpecError, match="for one token"):
        mask(one)


def test_grammars_are_compiled_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    some = Grammars(tokenizer, 300, (0,))
    first = some.compile(form(regex="ab"))
    assert some.compile(form(regex="ab", begin_after=(3,))) is first
    monkeypatch.setattr(grammars, "_MOST_CACHED", 2)
    some.compile(form(regex="b"))
    some.compile(form(regex="ab"))
    some.compile(form(regex="c"))  # drops b, the one used longest ago
    assert some.compile(form(regex="ab")) is first


def test_without_the_library(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtra, match="llguidance"):
        Grammars(tokenizer, 300, (0,)).compile(form(regex="ab"))


def test_masks_filled_together_are_those_of_each_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"type": "string", "minLength": 30, "maxLength": 40}
    forms = [
        form(regex="[a-c]{30}"),
        form(regex="[0-9]+x"),
        form(choice=("a b c d e f", "a b c x y z")),
        form(json_schema=long),
    ]
    some = [open_(tokenizer, one) for one in forms] + [
        Constraint(300, allowed=[5]),
        open_(tokenizer, forms[0], begin_after=(7,)),
    ]
    for wanted in ({0, 1, 2, 3}, {0, 1, 2, 3}, set()):
        together = np.full((len(some), some[0].num_words), -1, dtype=np.int32)
        asked = masks.ask_together(some, range(len(some)), together)
        assert asked == wanted
        for place, one in enumerate(some):
            one.fill(together[place], asked=place in asked)
            assert bits(together[place]) == mask(one)
        for one in some:
            one.accept(min(mask(one)))
        monkeypatch.setattr(masks, "MASK_S", -1.0)  # now they are suspected, and asked alone
    assert [one.suspected for one in some] == [True] * 4 + [False] * 2
    assert not Constraint(300, eos_ids=()).fits and Constraint(300, eos_ids=(0,)).fits
