"""Specs: reading, printing, overriding, and what a mistake says."""

from typing import Annotated, ClassVar, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from hone.base.errors import SpecError
from hone.base.spec import Spec, describe_fields, fingerprint, parse_scalar, read_yaml
from hone.base.table import Choice, Table, Technique


class Round(Technique):
    """Rounds."""

    bits: int = Field(4, ge=2, le=8, description="Bits a weight.")
    needs: ClassVar = frozenset()


TABLE = Table("quantizer", {"round": "tests.base.test_spec:Round"})


class Inner(Spec):
    rate: float = Field(0.1, description="A rate.")


class Outer(Spec):
    steps: int = Field(10, ge=1, description="Steps.")
    inner: Inner = Field(Inner(), description="Inner.")
    quantizer: Annotated[Technique, Choice(TABLE)] = Field(
        default_factory=lambda: TABLE.read("round"), description="Q."
    )
    chain: tuple[Annotated[Technique, Choice(TABLE)], ...] = Field((), description="Several.")


def test_yaml_round_trip():
    spec = Outer(steps=3, chain=["round", {"kind": "round", "bits": 3}])
    again = Outer.read(yaml.safe_load(spec.to_yaml()))
    assert again == spec
    assert again.chain[1].bits == 3 and again.chain[1].kind == "round"


def test_overrides_are_dotted():
    spec = Outer().override({"quantizer.bits": "3", "inner.rate": "1e-3", "chain": "[round]"})
    assert (spec.quantizer.bits, spec.inner.rate, spec.chain[0].bits) == (3, 1e-3, 4)
    assert Outer.from_overrides({"inner.rate": "0.5", "steps": "7"}) == Outer(steps=7, inner=Inner(rate=0.5))


@pytest.mark.parametrize("read", [Outer.from_overrides, Outer().override])
@pytest.mark.parametrize("whole", ["round", "{kind: round, bits: 3}"])
@pytest.mark.parametrize("first", ["quantizer", "quantizer.kind"])
def test_two_techniques_for_one_slot_are_refused(read, whole, first):
    """In whatever order they come; the same one twice is not two, and a field beside the technique is its option."""
    changes = {"quantizer": whole, "quantizer.kind": "floor"}
    changes = {name: changes[name] for name in (first, *(changes.keys() - {first}))}
    with pytest.raises(
        SpecError, match=r"Outer: quantizer\.kind=floor and quantizer=round name two techniques"
    ) as caught:
        read(changes)
    assert caught.value.fix == "give one of them"
    same = Outer.from_overrides({"quantizer.kind": "round", "quantizer": "round", "quantizer.bits": "5"})
    assert same.quantizer == TABLE.read({"kind": "round", "bits": 5})


def test_two_techniques_in_a_file_are_refused(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text("quantizer: round\nquantizer.kind: floor\n")
    with pytest.raises(SpecError, match=r"quantizer\.kind=floor and quantizer=round name two techniques"):
        Outer.from_overrides({}, file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stps": "3"}, ["stps", "did you mean 'steps'"]),
        ({"inner.rat": "3"}, ["inner.rat", "did you mean 'rate'"]),
        ({"iner.rate": "3"}, ["iner.rate", "did you mean 'inner'"]),
        ({"steps": "many"}, ["steps", "'many'"]),
        ({"steps": "0"}, ["steps", "0"]),
        ({"quantizer": "rond"}, ["unknown quantizer 'rond'", "did you mean 'round'"]),
        ({"quantizer.bits": "11"}, ["bits", "11"]),
        ({"quantizer.bit": "3"}, ["bit", "did you mean 'bits'"]),
        ({"chain.0.bits": "3"}, ["chain.0.bits"]),
    ],
)
def test_a_mistake_names_the_field_and_the_way_out(change, words):
    with pytest.raises(SpecError) as error:
        Outer().override(change)
    assert error.value.fix
    for word in words:
        assert word in str(error.value)


def test_one_stands_for_a_list_of_one():
    assert Outer(chain="round") == Outer(chain=["round"]) == Outer.from_overrides({"chain": "round"})
    assert Outer(chain={"kind": "round", "bits": 3}).chain[0].bits == 3


def test_json_schema_lists_the_techniques():
    schema = Outer.model_json_schema()
    assert schema["properties"]["quantizer"]["oneOf"][0]["properties"]["kind"] == {"const": "round"}


def test_every_field_is_listed_for_help():
    rows = describe_fields(Outer)
    assert [row[0] for row in rows] == ["steps", "inner.rate", "quantizer", "chain"]
    assert [row[1] for row in rows] == ["int", "float", "round", "list of round"]
    assert [row[2] for row in rows] == ["10", "0.1", "round", "[]"]


@pytest.mark.slow
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
def test_fingerprint_ignores_order_only(values):
    shuffled = dict(reversed(list(values.items())))
    assert fingerprint(values) == fingerprint(shuffled)
    assert fingerprint({**values, "extra": 1}) != fingerprint({**values, "extra": 2})


def test_fingerprint_refuses_what_json_cannot_say():
    with pytest.raises((TypeError, ValueError)):
        fingerprint({"a": float("nan")})
    with pytest.raises(TypeError):
        fingerprint({"a": object()})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3", 3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("null", None),
        ("a/b", "a/b"),
        ("1:2", "1:2"),
        ("-.5", -0.5),
        ("e5", "e5"),
        ("3d-printing", "3d-printing"),
    ],
)
def test_scalars(text, value):
    assert parse_scalar(text) == value


def test_an_option_without_its_value_is_not_one():
    class Numbers(Spec):
        count: int = Field(3, description="Count.")
        share: float | None = Field(None, description="Share.")
        on: bool = Field(False, description="On.")

    for name in ("count", "share"):
        with pytest.raises(SpecError, match=f"Numbers.{name} = True: this needs a number"):
            Numbers.from_overrides({name: "true"})
    assert Numbers.from_overrides({"on": "true"}).on


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("a: 1\nb: 2\n'a': 3\n", "a", "lines 1 and 3"),
        ("list:\n- rate: 1\n- rate: 2\n  x: 0\n  rate: 3\n", "rate", "lines 3 and 5"),
        ("{a: 1, a: 1}\n", "a", "line 1"),
        ("yes: 1\ntrue: 2\n", "true", "lines 1 and 2"),
    ],
)
def test_a_key_given_twice_is_one_error(tmp_path, text, key, lines):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_yaml(path)
    assert caught.value.what == f"{path} gives '{key}' twice, in {lines}" and "keep one" in caught.value.fix


def test_what_a_merge_brings_may_be_given_again(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, x: 4}\nd: {<<: *b, y: 5}\n")
    assert read_yaml(path) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 4, "y": 3},
        "d": {"x": 1, "y": 5},
    }


def test_a_value_of_the_command_line_gives_no_key_twice():
    assert parse_scalar("{a: 1, b: {a: 2}}") == {"a": 1, "b": {"a": 2}}
    with pytest.raises(SpecError, match="gives 'a' twice"):
        parse_scalar("{b: {a: 1, a: 2}}")


def test_a_date_that_is_none_is_no_traceback(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: 2001-99-99\n")
    with pytest.raises(SpecError, match="is not a YAML file"):
        read_yaml(path)


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: {c: *a}}\n"])
def test_a_value_that_contains_itself_is_refused(text, tmp_path):
    """Whoever walks such a value, as for the line of a mistake in it, would never end."""
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="line 1, column 4: found unconstructable recursive node"):
        read_yaml(path)


def test_an_error_of_yaml_has_its_line(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("line: x\nstages:\n  - stage: data\n   name: y\n")
    with pytest.raises(SpecError, match="line 4, column 4: "):
        read_yaml(path)


def test_defaults_are_shown_as_they_are_typed():
    class Defaults(Spec):
        none: int | None = None
        yes: bool = True
        names: tuple[str, ...] = ("exact", "minhash")

    shown = {name: default for name, _, default, _ in describe_fields(Defaults)}
    assert [shown[name] for name in ("none", "yes", "names")] == ["null", "true", "[exact, minhash]"]
    assert all(Defaults.from_overrides({name: shown[name]}) == Defaults() for name in ("none", "yes", "names"))


def test_a_spec_that_a_word_is_short_for_is_shown_as_its_words():
    class Kept(Spec):
        kind: Literal["teacher"] = "teacher"
        every: int = 2

    class Begun(Spec):
        init: Literal["random"] | Kept | None = Field("random", description="How it begins.")

    [(_, kind, _, _)] = describe_fields(Begun)
    assert kind == "random|teacher|null"
