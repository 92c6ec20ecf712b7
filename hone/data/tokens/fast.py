"""Fast encoding: runs a byte-level BPE of `tokenizers` with tiktoken, five times as fast, if their ids are provably equal.

tiktoken merges the two neighbours whose joint bytes have the lowest rank; `tokenizers` merges the pair that is first in
a list of merges. Both give the same ids if encoding every token's own bytes by the merges gives that token back: up to the
merge, the bytes between a token's ends are merged as if they were alone, and alone they have exactly one last pair.
`build` checks this for every token, and refuses a tokenizer, with the reason, if it cannot prove it.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import unicodedata
from typing import Any, NamedTuple

import numpy as np
import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FAST_WORD = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|"
_FAST_REST = r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"
# The same splits without backtracking. Every pattern here matches all of a text, so no characters are lost between matches.
_PATTERNS = {
    _GPT2: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s+",
    _WORD + r"\p{N}{1,3}" + _REST: _FAST_WORD + r"\p{N}{1,3}+" + _FAST_REST,  # Llama 3, cl100k
    _WORD + r"\p{N}" + _REST: _FAST_WORD + r"\p{N}" + _FAST_REST,  # Qwen 2
}
_NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


class _Refused(Exception):
    """The reason why a tokenizer cannot be run by tiktoken."""


class FastBPE(NamedTuple):
    """One tokenizer in tiktoken's form. `ids` [num_ranks] maps tiktoken's ranks to the tokenizer's ids."""

    encoding: Any
    ids: np.ndarray
    normalizer: Any
    add_prefix_space: bool
    raw: _Added
    normalized: _Added

    def encode(self, text: str) -> np.ndarray | None:
        """The ids of `text`; None when it has characters that the two libraries may classify differently."""
        if not text.isascii():
            suspects = _suspects(self.normalizer is not None)
            if suspects is not None and suspects[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any():
                return None
        if self.raw.pattern is None and self.normalized.pattern is None:
            return self._plain(self._normalize(text))
        found = []
        for token, part in self.raw.split(text):
            if token is not None:
                found.append(token)
                continue
            for inner, piece in self.normalized.split(self._normalize(part)):
                found.append(self._plain(piece) if inner is None else inner)
        return np.concatenate(found) if found else self.ids[:0]

    def _normalize(self, text: str) -> str:
        if self.normalizer is None or text.isascii() or unicodedata.is_normalized("NFC", text):
            return text
        return self.normalizer.normalize_str(text)

    def _plain(self, text: str) -> np.ndarray:
        if self.add_prefix_space and text and not text.startswith(" "):
            text = " " + text
        return self.ids[self.encoding.encode_to_numpy(text, disallowed_special=())]


class _Added(NamedTuple):
    """Added tokens, cut out of the text before it is split: `pattern` finds them, longest first, `arrays` has their ids."""

    pattern: re.Pattern[str] | None
    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, rows: list[dict[str, Any]], dtype: np.dtype) -> _Added:
        """Special tokens in `rows` are encoded as plain text, but no other token is searched for inside of them."""
        arrays = {row["content"]: np.array([row["id"]], dtype) for row in rows if not row["special"]}
        if not arrays:
            return cls(None, {})
        words = sorted({row["content"] for row in rows}, key=len, reverse=True)
        return cls(re.compile("|".join(map(re.escape, words))), arrays)

    def split(self, text: str) -> list[tuple[np.ndarray | None, str]]:
        """`text` as (token's array or None, part), without empty parts."""
        if self.pattern is None:
            return [(None, text)] if text else []
        parts: list[tuple[np.ndarray | None, str]] = []
        begun = 0
        for match in self.pattern.finditer(text):
            array = self.arrays.get(match.group())
            if array is None:
                continue
            if match.start() > begun:
                parts.append((None, text[begun : match.start()]))
            parts.append((array, match.group()))
            begun = match.end()
        if begun < len(text):
            parts.append((None, text[begun:]))
        return parts


def build(core: Any, dtype: np.dtype) -> tuple[FastBPE | None, str]:
    """(the fast form of a `tokenizers.Tokenizer`, "") or (None, why there is none). Special tokens are encoded as text."""
    try:
        import tiktoken
    except ImportError:
        return None, "the package 'tiktoken' is not installed (pip install 'hone-llm[data]')"
    spec = json.loads(core.to_str())
    try:
        pattern, add_prefix_space = _splitting(spec["pre_tokenizer"])
        _check_normalizer(spec["normalizer"])
        for row in spec["added_tokens"]:
            if not row["special"] and (row["single_word"] or row["lstrip"] or row["rstrip"]):
                raise _Refused(f"its added token {row['content']!r} takes spaces around it")
        ranks, ids = _ranks(spec["model"])
    except _Refused as refused:
        return None, str(refused)
    marks = {"<|never used|>": len(ids)}  # tiktoken requires a special token
    encoding = tiktoken.Encoding("hone", pat_str=pattern, mergeable_ranks=ranks, special_tokens=marks)
    sides = [[row for row in spec["added_tokens"] if row["normalized"] is side] for side in (False, True)]
    raw, normalized = (_Added.of(rows, dtype) for rows in sides)
    normalizer = core.normalizer if spec["normalizer"] else None
    return FastBPE(encoding, np.array(ids, dtype), normalizer, add_prefix_space, raw, normalized), ""


def _splitting(spec: dict[str, Any] | None) -> tuple[str, bool]:
    """(tiktoken's pattern, whether a space is added before a text) for the pre-tokenizer `spec`."""
    match spec:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": bool(prefix)}:
            return _PATTERNS[_GPT2], prefix
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if regex in _PATTERNS:
            return _PATTERNS[regex], False
    raise _Refused("its pre-tokenizer is not that of GPT-2, Llama 3 or Qwen 2")


def _check_normalizer(spec: dict[str, Any] | None) -> None:
    kinds = [part["type"] for part in spec["normalizers"]] if spec and spec["type"] == "Sequence" else None
    if spec and spec["type"] != "NFC" and (kinds is None or set(kinds) - {"NFC"}):
        raise _Refused(f"its normalizer is {'+'.join(kinds) if kinds else spec['type']}, not NFC")


def _ranks(model: dict[str, Any]) -> tuple[dict[bytes, int], list[int]]:
    """(rank of each token's bytes, id of each rank). Refuses merges that ranks cannot represent."""
    if model["type"] != "BPE":
        raise _Refused(f"its model is {model['type']}, not BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise _Refused(f"its BPE has {option}")
    vocab = model["vocab"]
    letters = _byte_letters()
    lacking = [byte for letter, byte in letters.items() if letter not in vocab and byte not in _NEVER_IN_UTF8]
    if lacking:
        raise _Refused(f"its vocabulary lacks the byte {lacking[0]:#04x}")
    letters = {letter: byte for letter, byte in letters.items() if letter in vocab}
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    names = list(letters)
    known = set(names)
    for left, right in merges:
        name = left + right
        if name != names[-1]:
            if name in known:
                raise _Refused(f"its merges for {name!r} are not consecutive")
            known.add(name)
            names.append(name)
    by_merges = tokenizers.models.BPE(vocab=vocab, merges=merges)
    for name in names[len(letters) :]:
        if len(by_merges.tokenize(name)) != 1:
            raise _Refused(f"its merges do not lead to its token {name!r}")
    if model.get("ignore_merges"):
        # A word that is a token gets that id, though merges may not lead to it. Such a token can be put after all others
        # if its bytes never merge down to two parts, since only then would tiktoken merge them inside longer words.
        for name in vocab.keys() - known:
            if len(name) > 1 and set(name) <= letters.keys():
                if len(by_merges.tokenize(name)) == 2:
                    raise _Refused(f"its token {name!r} is only used as a whole word")
                names.append(name)
        names[len(known) :] = sorted(names[len(known) :])
    ranks = {bytes(letters[char] for char in name): rank for rank, name in enumerate(names)}
    return ranks, [vocab[name] for name in names]


def _byte_letters() -> dict[str, int]:
    """The character of each byte in byte-level vocabularies, as in GPT-2: printable bytes map to themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@functools.cache
def _suspects(unassigned: bool) -> np.ndarray | None:
    """Code points (bool [1114112]; None: none) whose class may differ between the libraries' editions of Unicode.

    With `unassigned`, also those that Python does not know yet; for all others it knows whether they are in NFC, since
    normalization never changes for a character once it is assigned.
    """
    import tiktoken

    suspects = np.zeros(sys.maxunicode + 1, bool)
    text = "".join(chr(code) for code in range(0x80, sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    for inside, outside in ((r"\p{L}", r"[^\p{L}]"), (r"\p{N}", r"[^\p{N}]"), (r"\s", r"\S")):
        one = tokenizers.normalizers.Replace(tokenizers.Regex(outside + "+"), "").normalize_str(text)
        bytes_only = {bytes([byte]): byte for byte in range(256)}
        probe = tiktoken.Encoding(
            "probe", pat_str=inside, mergeable_ranks=bytes_only, special_tokens={"<|never|>": 256}
        )
        other = probe.encode_to_numpy(text, disallowed_special=()).astype(np.uint8).tobytes().decode()
        for char in set(one) ^ set(other):
            suspects[ord(char)] = True
    if unassigned:
        for char in text:
            if unicodedata.category(char) == "Cn":
                suspects[ord(char)] = True
    return suspects if suspects.any() else None
