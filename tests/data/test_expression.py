"""Expressions agree with Python's own evaluation and refuse everything else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.data import FILTERS
from hone.data.expression import columns_of, evaluate

COLUMNS = {
    "words": np.array([1, 50, 100, 0]),
    "ratio": np.array([0.5, 0.1, np.nan, 2.0]),
    "kind": np.array(["code", "prose", "prose", "code"]),
}

comparisons = st.builds(
    "{} {} {}".format,
    st.sampled_from(["words", "words + 1", "2 * words", "-words", "words % 7", "words / 3"]),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    st.integers(-5, 120),
) | st.sampled_from(
    ["kind == 'code'", "kind != 'code'", "kind in ('code', 'x')", "kind not in ('code',)", "10 <= words < 100"]
)
trees = st.recursive(
    comparisons,
    lambda inner: (
        st.builds("({} and {})".format, inner, inner)
        | st.builds("({} or {})".format, inner, inner)
        | st.builds("(not {})".format, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(trees)
def test_agrees_with_python_row_by_row(text):
    expected = [
        bool(eval(text, {}, {"words": int(words), "kind": str(kind)}))
        for words, kind in zip(COLUMNS["words"], COLUMNS["kind"])
    ]
    assert evaluate(text, COLUMNS).tolist() == expected


def test_constants_reach_every_row_and_nan_compares_false():
    assert evaluate("True", COLUMNS).tolist() == [True] * 4
    assert evaluate("ratio >= 0 or ratio < 0", COLUMNS).tolist() == [True, True, False, True]
    assert columns_of("a < 1 and b == 'c'") == {"a", "b"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "words.real > 1",
        "words[0] > 1",
        "[w for w in words]",
        "lambda: 1",
        "words if words else 1",
        "2 ** words > 1",
        "words >",
        "",
        "(" * 400 + "1" + ")" * 400,
        "f'{words}' == '1'",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(SpecError):
        evaluate(text, COLUMNS)


def test_mistakes_name_the_column_and_the_types():
    with pytest.raises(SpecError, match="did you mean 'words'"):
        evaluate("wrods > 3", COLUMNS)
    with pytest.raises(SpecError, match="cannot be evaluated"):
        evaluate("kind > 3", COLUMNS)
    with pytest.raises(SpecError, match="text, not true or false"):
        evaluate("kind", COLUMNS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kind == 5", "'kind' is text, '5' is a number"),
        ("words in ('a', 'b')", "''a'' is text, 'words' is a number"),
        ("words < 5 < 'b'", "''b'' is text, '5' is a number"),
        ("not kind", "'kind' is text, not true or false"),
        ("words > 3 and kind", "'kind' is text, not true or false"),
        ("kind + 1 > 3", "'kind' is text"),
        ("(words > 3) == kind", "'kind' is text, 'words > 3' is a number"),
    ],
)
def test_text_is_no_number(text, why):
    """numpy would answer some of these with False for every document, without a word."""
    with pytest.raises(SpecError, match="cannot be evaluated") as error:
        evaluate(text, COLUMNS)
    assert why in error.value.what
    with pytest.raises(SpecError, match="cannot be evaluated"):
        FILTERS.read({"kind": "expression", "keep": text})  # when it is read, before any text is
    with pytest.raises(SpecError, match="cannot be evaluated"):
        FILTERS.read({"kind": "length", "when": text})


def test_columns_of_scorers_are_not_known_before():
    assert FILTERS.read({"kind": "expression", "keep": "quality >= 0.5 and kind in ('a', 'b')"})


@pytest.mark.parametrize("text", ["kind in ('code')", 'kind not in "code"', "kind in words"])
def test_brackets_around_one_value_are_no_list(text):
    with pytest.raises(SpecError, match="needs a list") as error:
        evaluate(text, COLUMNS)
    value = "words" if text.endswith("words") else "'code'"
    assert error.value.fix == f"write a comma after it: ({value},)"
