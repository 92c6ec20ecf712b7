"""Deltas of text: never half a character, never part of a stop text, in sum the full decode."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.model.tokenizer import Tokenizer, load_tokenizer
from hone.serve.detokenize import Detokenizer, TextStream


def sentencepiece() -> Tokenizer:
    """A Llama-2-like vocabulary: U+2581 for spaces, byte tokens, a special token."""
    pieces = ["<unk>", "<s>", "\u2581the", "\u2581cat", "s", "\u2581", "at", "\u00e9", "\u2581\u4f60", "!"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: place for place, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    core.add_special_tokens(["<s>"])
    decoders = tokenizers.decoders
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core, bos_id=1)


SENTENCEPIECE = sentencepiece()


@pytest.fixture(scope="module")
def byte_level(tiny_llama):
    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.core.add_tokens(["<tool>", "\u00dc ber"])  # added but not special: part of the text
    return tokenizer


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = ()) -> list[str]:
    one = Detokenizer(tokenizer, prompt)
    return [one.push(token) for token in ids] + [one.flush()]


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 321), max_size=30))
def test_byte_level_deltas_sum_to_the_decode(byte_level, ids):
    assert "".join(deltas(byte_level, ids)) == byte_level.decode(ids)


@settings(max_examples=300)
@given(
    ids=st.lists(st.one_of(st.integers(0, 9), st.integers(0xE0, 0xF0), st.integers(0x80, 0xC5)), max_size=20),
    prompt=st.lists(st.integers(2, 9), min_size=0, max_size=9),
)
def test_sentencepiece_deltas_sum_to_the_decode(ids, prompt):
    """With a prompt the text is what the prompt's text goes on with, leading space included."""
    whole, before = SENTENCEPIECE.decode(prompt + ids), SENTENCEPIECE.decode(prompt)
    assert "".join(deltas(SENTENCEPIECE, ids, prompt)) == whole[len(before) :]


def test_characters_come_whole(byte_level):
    text = "na\u00efve \u4f60\u597d \U0001f600!"
    ids = byte_level.encode(text)
    pieces = deltas(byte_level, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len(text)


@settings(max_examples=200)
@given(
    text=st.text("ab\u4f60 ", min_size=1, max_size=24),
    stops=st.lists(st.text("ab\u4f60 ", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_texts_cut_at_their_first_place(byte_level, text, stops, include):
    """Against searching in the finished text; nothing that is shown may have to be taken back."""
    stream = TextStream(byte_level, (), stops, include_stop=include)
    shown = ""
    for token in byte_level.encode(text):
        shown += stream.push(token)
        if stream.matched is not None:
            break
    shown += stream.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert shown == text and stream.matched is None
        return
    assert stream.matched in stops
    place = text.find(stream.matched)
    assert shown == text[: place + len(stream.matched)] if include else shown == text[:place]


def test_stops_before_min_tokens_do_not_count(byte_level):
    ids = byte_level.encode("ababab")
    stream = TextStream(byte_level, (), ("ab",), min_tokens=len(ids) - 1)
    shown = "".join(stream.push(token) for token in ids[:-2])
    assert shown and stream.matched is None
