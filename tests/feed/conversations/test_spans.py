"""Spans: of twelve stock templates the answers and their ends of turn are trained on, and nothing else; what cannot be is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hone.feed.conversations.spans import Encoded, Spans, Unusable
from hone.feed.conversations.templates import ZEPHYR
from hone.model.tokenizer import Tokenizer
from tests.feed.conversations.stock import STOCK, Stock, tokenizer_of

TURNS = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three and three?"},
    {"role": "assistant", "content": "Six,\nof course."},
]
SYSTEM = {"role": "system", "content": "Be short."}
CALLS = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome", "at": 1}}}]},
    {"role": "tool", "content": "18 degrees"},
    {"role": "assistant", "content": "It is 18 degrees."},
]  # fmt: skip


def spans_of(stock: Stock, **options: Any) -> tuple[Tokenizer, Spans]:
    tokenizer = tokenizer_of(stock)
    return tokenizer, Spans(tokenizer, tokenizer.core.token_to_id(stock.special[1]), **options)


def trained_texts(tokenizer: Tokenizer, found: Encoded) -> list[str]:
    """The text of each run of trained tokens."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], found.trained.astype(int), [0]])))
    return [tokenizer.decode(found.ids[begin:end].tolist(), False) for begin, end in borders.reshape(-1, 2)]


def around(stock: Stock, answers: list[str]) -> list[str]:
    *inner, last = answers
    texts = [stock.inner[0] + text + stock.inner[1] for text in inner]
    return [*texts, stock.last[0] + last + stock.last[1]]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", STOCK)
def test_answers_and_their_ends_are_trained_on_and_nothing_else(name, system):
    stock = STOCK[name]
    if system and not stock.system:
        pytest.skip("the template has no system messages")
    tokenizer, spans = spans_of(stock)
    messages = [SYSTEM, *TURNS] if system else TURNS
    found = spans.encode(messages)
    assert trained_texts(tokenizer, found) == around(stock, ["Four.", "Six,\nof course."])
    text = tokenizer.chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(found.ids.tolist(), False).startswith(text)
    if stock.bos:  # at most one before every prompt, as the template writes it
        assert (found.ids[:2] == tokenizer.bos_id).sum() == 1
    if (name, system) == ("mistral", True):
        return  # its system message is in the last message or nowhere, so that no prompt is in the whole
    # What a server is given before the last answer is what is before it here.
    prompt = tokenizer.encode(tokenizer.chat(messages[:-1]), add_special_tokens=False)
    last = np.flatnonzero(~found.trained)[np.flatnonzero(~found.trained) < np.flatnonzero(found.trained)[-1]][-1]
    assert found.ids[: last + 1].tolist() == prompt


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3.1"])
def test_calls_of_tools_are_trained_on_and_their_results_are_not(name):
    stock = STOCK[name]
    tokenizer, spans = spans_of(stock)
    texts = trained_texts(tokenizer, spans.encode(CALLS, [{"type": "function", "function": {"name": "weather"}}]))
    assert '{"name": "weather", ' in texts[0] and '{"city": "Rome", "at": 1}' in texts[0]
    assert texts[0].endswith(stock.inner[1]) and texts[1] == "".join(
        [stock.last[0], "It is 18 degrees.", stock.last[1]]
    )
    assert len(texts) == 2 and "18 degrees" not in texts[0]


def test_which_answers_count():
    tokenizer, last = spans_of(STOCK["chatml"], train_on="last")
    assert trained_texts(tokenizer, last.encode(TURNS)) == ["Six,\nof course.<|im_end|>"]
    _, every = spans_of(STOCK["chatml"], train_on="all")
    assert every.encode(TURNS).trained.all()
    _, spans = spans_of(STOCK["chatml"])
    skipped = [*TURNS[:1], {**TURNS[1], "weight": 0}, *TURNS[2:]]
    assert trained_texts(tokenizer, spans.encode(skipped)) == ["Six,\nof course.<|im_end|>"]
    assert trained_texts(tokenizer, spans.encode(TURNS, first=2)) == ["Six,\nof course.<|im_end|>"]


def test_a_template_without_an_end_of_turn_gets_the_end_of_text():
    bare = Stock("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", ("<unk>", "<end>"))
    tokenizer, spans = spans_of(bare)
    found = spans.encode(TURNS[:2])
    assert trained_texts(tokenizer, found)[0].endswith("Four.\n<end>")
    assert (found.ids == tokenizer.core.token_to_id("<end>")).sum() == 1
    zephyr = Stock(ZEPHYR, ("<unk>", "<end>"))
    tokenizer, spans = spans_of(zephyr)
    found = spans.encode(TURNS)
    assert trained_texts(tokenizer, found) == ["Four.<end>", "Six,\nof course.<end>"]
    assert found.ways == ("ids", "ids")


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '[A]' }}{% generation %}{{ m.content | upper | replace('\\ue000', '') }}"
    "{{ '<end>' }}{% endgeneration %}{% else %}{{ '[U]' + m.content + messages | length | string }}{% endif %}{% endfor %}"
)


def test_where_texts_are_no_prefixes_the_templates_own_marks_tell():
    tokenizer, spans = spans_of(Stock(MARKED, ("<unk>", "<end>")))
    found = spans.encode(TURNS)
    assert trained_texts(tokenizer, found) == ["FOUR.<end>", "SIX,\nOF COURSE.<end>"]
    assert set(found.ways) == {"generation"}
    unmarked = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    _, spans = spans_of(Stock(unmarked, ("<unk>", "<end>")))
    with pytest.raises(Unusable, match=r"messages\[1\].*generation") as caught:
        spans.encode(TURNS)
    assert caught.value.reason == "message_not_found"


def test_what_cannot_be_trained_on():
    _, spans = spans_of(STOCK["gemma2"])
    with pytest.raises(Unusable, match="System role not supported"):
        spans.encode([SYSTEM, *TURNS])
    _, spans = spans_of(STOCK["chatml"])
    with pytest.raises(Unusable, match=r"messages\[0\].content spells the token <\|im_end\|>"):
        spans.encode([{"role": "user", "content": "hi<|im_end|>"}, TURNS[1]])
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "say", "arguments": {"text": "a<|im_end|>"}}}],
    }
    with pytest.raises(Unusable, match=r"messages\[1\].tool_calls\[0\].function.arguments.text spells the token"):
        spans.encode([TURNS[0], called])
    with pytest.raises(Unusable, match=r"tools\[0\].name spells the token"):
        spans.encode(TURNS, [{"name": "<|im_start|>"}])
    twice = Stock("{{ bos_token + bos_token }}" + ZEPHYR, ("<s>", "<end>"), "<s>")
    with pytest.raises(Unusable, match="twice"):
        spans_of(twice)[1].encode(TURNS)
