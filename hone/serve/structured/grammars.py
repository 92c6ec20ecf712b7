"""Grammars of llguidance: their source from a spec, their compilation in a thread, and a cache of compiled ones.

llguidance (Microsoft, MIT) computes the mask of a token by walking the trie of the vocabulary's bytes with a lexer of
derivatives and an Earley parser. It was taken because it has no dependencies, one wheel for all Pythons, and compiles a
schema in about a millisecond; the figures beside xgrammar are in docs/serving.md.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from hone.base.errors import MissingExtra, SpecError
from hone.model.tokenizer import Tokenizer
from hone.serve.structured.deep import DeepThread
from hone.serve.structured.spec import StructuredOutputs

_MOST_CACHED = 128
_LEXER_STATES = 50_000  # of 1 to 2 kB each
_SHOWN = 300


def library() -> Any:
    """The module llguidance. Raises MissingExtra."""
    try:
        import llguidance
    except ImportError:
        raise MissingExtra.of("structured output", "llguidance", "serve") from None
    return llguidance


def source(spec: StructuredOutputs) -> str:
    """The grammar in llguidance's form. Raises SpecError for GBNF that cannot be read."""
    matcher = library().LLMatcher
    if spec.json_schema is not None or spec.json_object:
        schema = json.loads(spec.json_schema) if spec.json_schema is not None else {"type": "object"}
        return str(matcher.grammar_from_json_schema(schema, overrides=spec.whitespace))
    if spec.regex is not None:
        ascii_only = library().regex_to_lark(spec.regex, use_ascii="dws")
        return str(matcher.grammar_from_lark(f"start: /{ascii_only}/"))
    if spec.choice:
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in spec.choice)))
    assert spec.grammar is not None, "a spec has one kind"
    text = spec.grammar
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # the converter raises what it happens upon
            raise SpecError(f"the grammar is no GBNF: {error}", fix="write it in GBNF or in Lark's form") from None
    return str(matcher.grammar_from_lark(text))


class _Words:
    """A vocabulary as llguidance reads it: every token's bytes, and a function from texts to tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        special = tokenizer.special_ids | set(eos_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.bos_token_id = None
        for token in self.special_token_ids:  # one without a spelling must still be no text
            self.tokens[token] = self.tokens[token] or f"<|special_{token}|>".encode()
        ends = sorted(token for token in eos_ids if token < vocab_size)
        if not ends:  # llguidance needs one: a token past the vocabulary, which no mask shows
            ends = [len(self.tokens)]
            self.tokens.append(b"<|end|>")
            self.special_token_ids.append(ends[0])
        self.eos_token_id, self.ends = ends[0], ends
        self._tokenizer = tokenizer
        special_set = set(self.special_token_ids)
        self._ids = {word: token for token, word in enumerate(self.tokens) if word and token not in special_set}
        self._longest = max((len(word) for word in self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that the grammar forces: the tokenizer's own where they spell it exactly."""
        raw = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(raw.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            ids = []
        if ids and b"".join(self.tokens[token] for token in ids) == raw:
            return ids
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(raw):
            for length in range(min(self._longest, len(raw) - at), 0, -1):
                if (token := self._ids.get(raw[at : at + length])) is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                break  # a byte that no token has
        return ids


class _Bytes(_Words):
    """One token for each byte, and the special tokens of a tokenizer: enough to check a grammar."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        special = [] if tokenizer is None else sorted(tokenizer.special_ids)
        self.tokens = [bytes([byte]) for byte in range(256)] + [tokenizer.token_bytes(one) for one in special]  # type: ignore[union-attr]
        self.tokens.append(b"<|end of text|>")
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.bos_token_id = None
        self.eos_token_id = len(self.tokens) - 1
        self.ends = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _read(words: _Words) -> Any:
    lib = library()
    return lib.LLTokenizer(lib.TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.ends)


def compiled(tokenizer: Any, grammar: str) -> Any:
    """The matcher of a grammar at its start. Raises SpecError for a grammar that is wrong, unsupported or too large.

    It recurses, a level for each rule that another one begins with: run it in a `DeepThread`.
    """
    lib = library()
    limits = lib.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
    matcher = lib.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        text = " ".join(matcher.get_error().split())
        raise SpecError(
            f"the grammar cannot be compiled: {text[:_SHOWN]}", fix="correct it, or leave out what it names"
        )
    return matcher


class GrammarCheck:
    """Tells whether a grammar can be compiled, without the whole vocabulary: the server asks before it queues a request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._words = _Bytes(tokenizer)
        self._tokenizer: Any = None
        self._thread = DeepThread("hone-grammar-check")

    def __call__(self, spec: StructuredOutputs) -> Future[None]:
        """Done when the grammar compiles; it raises SpecError when it does not, MissingExtra without llguidance."""
        return self._thread.submit(self._check, spec)

    def _check(self, spec: StructuredOutputs) -> None:
        if self._tokenizer is None:
            self._tokenizer = _read(self._words)
        compiled(self._tokenizer, source(spec))


class Grammars:
    """Compiles grammars for one vocabulary in a thread of its own, and keeps the last used ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._words = (tokenizer, vocab_size, frozenset(eos_ids))
        self._tokenizer: Any = None
        self._thread = DeepThread("hone-grammar")
        self._known: OrderedDict[StructuredOutputs, Future[Any]] = OrderedDict()

    def compile(self, spec: StructuredOutputs) -> Future[Any]:
        """The matcher of `spec`, to be copied for each sequence: `deep_copy` takes microseconds. Raises MissingExtra."""
        library()
        spec = spec.model_copy(update={"begin_after": ()})
        found = self._known.get(spec)
        if found is None:
            found = self._known[spec] = self._thread.submit(self._compile, spec)
            if len(self._known) > _MOST_CACHED:
                self._known.popitem(last=False)
        self._known.move_to_end(spec)
        return found

    def _compile(self, spec: StructuredOutputs) -> Any:
        if self._tokenizer is None:
            self._tokenizer = _read(_Words(*self._words))
        return compiled(self._tokenizer, source(spec))
