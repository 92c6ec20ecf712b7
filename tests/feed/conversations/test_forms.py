"""Forms of conversations: rows of every form become the same messages, and each error names the field."""

from __future__ import annotations

import pytest

from hone.feed.conversations.forms import FormError, conversation, form_of

ASKED, SAID = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}


@pytest.mark.parametrize(
    "form, row",
    [
        ("messages", {"messages": [ASKED, SAID]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Two and two?"}]}, SAID]}),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]},
        ),
        ("alpaca", {"instruction": "Two and two?", "input": "", "output": "Four."}),
        ("prompt_completion", {"prompt": "Two and two?", "completion": "Four."}),
        ("prompt_completion", {"prompt": [ASKED], "completion": [SAID]}),
    ],
)
def test_every_form_becomes_messages(form, row):
    assert form_of(row) == form
    assert conversation(row) == conversation(row, form) == {"messages": [ASKED, SAID]}


def test_more_of_each_form():
    alpaca = {"system": "Be short.", "instruction": "Add.", "input": "2 2", "output": "4", "history": [["Hi", "Hello"]]}
    found = conversation(alpaca)["messages"]
    assert [one["role"] for one in found] == ["system", "user", "assistant", "user", "assistant"]
    assert found[3]["content"] == "Add.\n\n2 2"
    text = '{"name": "add", "arguments": {"a": 2, "b": 2}}'
    shared = {
        "conversations": [
            {"from": "human", "value": "Add 2 and 2."},
            {"from": "function_call", "value": text},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "Four."},
        ],
        "tools": '[{"name": "add"}]',
    }
    found = conversation(shared)
    assert found["messages"][1]["tool_calls"][0]["function"] == CALL
    assert found["messages"][2]["role"] == "tool" and found["tools"] == [{"name": "add"}]


def test_arguments_become_objects_and_nulls_of_tables_go():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    row = {
        "messages": [
            {**ASKED, "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "strict": None}}],
    }
    found = conversation(row)
    assert found["messages"][0] == ASKED
    assert found["messages"][1]["content"] == "" and found["messages"][1]["tool_calls"][0]["function"] == CALL
    assert found["tools"] == [{"type": "function", "function": {"name": "add"}}]


def test_preferences_have_a_prompt_and_two_answers():
    other = {"role": "assistant", "content": "Five."}
    expected = {"messages": [ASKED], "chosen": [SAID], "rejected": [other]}
    assert conversation({"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}) == expected
    assert conversation({"chosen": [ASKED, SAID], "rejected": [ASKED, other]}) == expected
    assert conversation({"prompt": [ASKED], "chosen": [ASKED, SAID], "rejected": [ASKED, other]}) == expected


@pytest.mark.parametrize(
    "row, said",
    [
        ([1], "the row is [1], not an object"),
        ({"text": "x"}, "the row has fields text"),
        ({"messages": [ASKED]}, "no message of the assistant"),
        ({"messages": [ASKED, {"role": "robot", "content": "x"}]}, 'messages[1].role is "robot"'),
        ({"messages": [{"role": "user"}, SAID]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 3}, SAID]}, "messages[0].content is 3"),
        ({"messages": [ASKED, {**SAID, "weight": 0.5}]}, "messages[1].weight"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]}, "messages[0].content[0].type"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[1].tool_calls[0].function.name"),
        ({"conversations": [{"from": "human"}]}, "conversations[0].value is missing"),
        ({"instruction": None, "output": "x"}, "instruction is missing"),
        ({"messages": [ASKED, SAID], "tools": "[{"}, "tools is no JSON"),
        ({"prompt": "x", "chosen": "a", "rejected": [ASKED]}, "rejected has no message of the assistant"),
    ],
)  # fmt: skip
def test_errors_name_the_field(row, said):
    with pytest.raises(FormError) as caught:
        conversation(row)
    assert said in str(caught.value)
