"""Tool calls and reasoning out of growing texts: what each form gives, and that no cut of the text changes it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.serve.http.reasoning import REASONING_PARSERS, ReasoningSplitter, reasoning_form
from hone.serve.http.tools import TOOL_PARSERS, tool_parser
from hone.serve.http.tools.forced import NamedParser, RequiredParser, named_schema, required_schema
from hone.serve.http.tools.parser import MOST_CALLS, TextOrCall, ToolCall, ToolParser

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
    "write": {"type": "object", "properties": {"text": {"type": "string"}, "force": {"type": ["boolean", "null"]}}},
}
TRICKY = 'a "quote", \\ {"x": [1}, </tool_call> [TOOL_CALLS] ]\n</parameter> ü \U0001f600'


def read(parser: ToolParser, parts: list[str]) -> list[TextOrCall]:
    pieces = [piece for part in parts for piece in parser.push(part)]
    return ToolParser._joined([*pieces, *parser.finish()])


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def body(one: ToolCall, key: str = "arguments") -> str:
    return f'{{"name": "{one.name}", "{key}": {one.arguments}}}'


SUN, NOW = call("weather", city="Paris", days=3, tags=["a", {"b": None}]), call("now")
HARD = call("write", text=TRICKY, force=True)

# form: texts with the pieces that they mean
WANTED: dict[str, list[tuple[str, list[TextOrCall]]]] = {
    "hermes": [
        (f"Well:\n<tool_call>\n{body(SUN)}\n</tool_call>", ["Well:\n", SUN]),
        (f"<tool_call>{body(HARD)}</tool_call>\n<tool_call>\n{body(NOW)}\n</tool_call>!", [HARD, "\n", NOW, "!"]),
        ('<tool_call>{"name": "now"}</tool_call>', [NOW]),
        (f"<tool_call>{body(SUN)}", [SUN]),  # the last mark is missing
        (f"<tool_call>{body(SUN)}</tool", [SUN, "</tool"]),
        ("<tool_call>{bad}</tool_call>x", ["<tool_call>{bad}</tool_call>x"]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', 0),
        ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', 0),
        ('<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', 0),
        ('a <tool_call>{"name": "weather", "arguments": {"city": "Par', 0),
        (f"<tool_call>text<tool_call>{body(NOW)}</tool_call>", ["<tool_call>text", NOW]),
        ("a < b <tool_ca", 0),
    ],
    "llama3_json": [
        (body(SUN, "parameters"), [SUN]),
        (f" <|python_tag|>{body(HARD, 'parameters')}; {body(NOW)}\n", [HARD, NOW, "\n"]),
        ('{"name": "Bob", "parameters": {}}', 0),
        ('{"temperature": 3}', 0),
        ("It is {1}.", 0),
        (f"{body(NOW)} and text", [NOW, " and text"]),
        ('{"name": "weather", "parameters": {"city"', 0),
        ("<|python_tag", 0),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{body(SUN)}, {body(HARD)}]", [SUN, HARD]),
        (f"Sure. [TOOL_CALLS]weather{SUN.arguments}[TOOL_CALLS]now{{}}", ["Sure. ", SUN, NOW]),
        (f"[TOOL_CALLS]write[ARGS]{HARD.arguments}", [HARD]),
        ("[TOOL_CALLS]other{}", 0),
        ("[TOOL_CALLS][1, 2]", 0),
        ("[TOOL_CALLS]weather", 0),
        ("[TOOL_CALLS]?", 0),
        ("[1] [TOOL", 0),
    ],
    "qwen3_coder": [
        (
            "Now.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            '<parameter=tags>\n["a", {"b": null}]\n</parameter>\n</function>\n</tool_call>',
            ["Now.\n", SUN],
        ),
        ("<tool_call><function=now></function></tool_call>", [NOW]),
        (
            "<tool_call><function=write><parameter=text>\n  if x:\n    <b>y</b>\n</parameter> z\n</parameter>"
            "<parameter=force>\nTrue\n</parameter></function></tool_call>",
            [call("write", text="  if x:\n    <b>y</b>\n</parameter> z", force=True)],
        ),
        ("<tool_call><function=write><parameter=text>5</parameter><parameter=force>null</parameter></function></tool_call>",
         [call("write", text="5", force=None)]),
        ("<tool_call><function=nothing></function></tool_call>", 0),
        ("<tool_call><function=write><parameter=text>5</function></tool_call>", 0),
        ("<tool_call><function=write>", 0),
    ],
    "pythonic": [
        ("[weather(city='Paris', days=3, tags=['a', {'b': None}]), now()]", [SUN, NOW]),
        (f"<|python_start|>[write(text={TRICKY!r}, force=True)]<|python_end|>", [HARD]),
        ("[1, 2, 3]", 0),
        ("[weather('Paris')]", 0),
        ("[now(**x)]", 0),
        ("[now(a=open('x'))]", 0),
        ("[now(a=b'x')]", 0),
        ("[now(), other()]", 0),
        ("[now(", 0),
        ("See [now()]", 0),
    ],
}  # fmt: skip
WANTED["qwen3_xml"] = WANTED["qwen3_coder"]
CASES = [(form, text, pieces or [text]) for form, each in WANTED.items() for text, pieces in each]


@pytest.mark.parametrize(("form", "text", "pieces"), CASES)
def test_each_form(form: str, text: str, pieces: list[TextOrCall]) -> None:
    assert read(tool_parser(form)(TOOLS), [text]) == pieces
    assert read(tool_parser(form)(TOOLS), list(text)) == pieces
    assert all(isinstance(json.loads(one.arguments), dict) for one in pieces if isinstance(one, ToolCall))


PARTS = [
    *{text for _, text, _ in CASES}, "<tool_call>", "</tool_call>", "{", "}", '"', "\\", "[", "]", "\n", " ", ";", "[TOOL_CALLS]",
    "<function=now>", "</function>", "<parameter=text>", "</parameter>", "now", "(", ")", '{"name": "now", "arguments": {}}',
    "<|python_tag|>", "<think>", "</think>", "ü",
]  # fmt: skip


def cut(text: str, places: list[int]) -> list[str]:
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[one:other] for one, other in pairwise(at)]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.lists(st.sampled_from(PARTS), max_size=6).map("".join),
    st.lists(st.integers(0, 10**6), max_size=8),
)
def test_any_cut_of_any_text_gives_the_same(form: str, text: str, places: list[int]) -> None:
    kind = tool_parser(form)
    whole = read(kind(TOOLS), [text])
    assert read(kind(TOOLS), cut(text, places)) == whole == read(kind(TOOLS), list(text))
    for piece in whole:
        if isinstance(piece, ToolCall):
            assert piece.name in TOOLS and isinstance(json.loads(piece.arguments), dict)
    if not any(isinstance(piece, ToolCall) for piece in whole):
        assert "".join(map(str, whole)) == text  # nothing is lost


def test_calls_that_the_grammar_forces() -> None:
    assert read(NamedParser({"weather": {}}), ['{"city": "', 'Paris"}']) == [call("weather", city="Paris")]
    assert read(NamedParser({"weather": {}}), ['{"city": "']) == ['{"city": "']
    both = f"[{body(SUN, 'parameters')}, {body(NOW, 'parameters')}]"
    assert read(RequiredParser(TOOLS), [both]) == [SUN, NOW]
    assert read(RequiredParser(TOOLS), [both[:-1]]) == [both[:-1]]
    schema = json.loads(required_schema(
        {"a": {"properties": {"x": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "null"}}}, "b": None}, parallel=False
    ))  # fmt: skip
    assert schema["$defs"] == {"t": {"type": "null"}} and schema["maxItems"] == 1
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    with pytest.raises(SpecError, match=r"\$defs/t"):
        required_schema({"a": {"$defs": {"t": {}}}, "b": {"$defs": {"t": {"type": "null"}}}}, parallel=True)
    assert json.loads(named_schema(None)) == {"type": "object"}


def test_many_calls_and_unknown_names() -> None:
    text = f"<tool_call>{body(NOW)}</tool_call>" * (MOST_CALLS + 2)
    pieces = read(tool_parser("hermes")(TOOLS), [text])
    assert pieces[:MOST_CALLS] == [NOW] * MOST_CALLS and len(pieces) == MOST_CALLS + 1
    with pytest.raises(SpecError, match="'hermse'"):
        tool_parser("hermse")
    with pytest.raises(SpecError, match="qwen33"):
        reasoning_form("qwen33")


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(REASONING_PARSERS)),
    st.sampled_from(["", "<assistant>", "<think>\n", "<think>\n\n</think>\n\n"]),
    st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "</", "think>", "so 1 < 2"]), max_size=6).map(
        "".join
    ),
    st.lists(st.integers(0, 10**6), max_size=6),
)
def test_reasoning_ends_at_its_mark(form: str, prompt: str, text: str, places: list[int]) -> None:
    kind = reasoning_form(form)

    def split(parts: list[str]) -> tuple[str, str]:
        one = ReasoningSplitter(kind, prompt)
        found = [one.push(part) for part in parts] + [one.push("", final=True)]
        return "".join(a for a, _ in found), "".join(b for _, b in found)

    reasoning, answer = split([text])
    assert (reasoning, answer) == split(cut(text, places)) == split(list(text))
    if prompt.endswith("</think>\n\n"):
        assert (reasoning, answer) == ("", text)
    elif prompt.endswith("<think>\n") or kind.always or text.lstrip().startswith("<think>"):
        rest = (
            text.lstrip().removeprefix("<think>")
            if text.lstrip().startswith("<think>") and not prompt.endswith("<think>\n")
            else text
        )
        assert (reasoning, answer) == (rest.partition("</think>")[0], rest.partition("</think>")[2])
    else:
        assert (reasoning, answer) == ("", text)
