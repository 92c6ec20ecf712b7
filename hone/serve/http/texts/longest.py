"""How many characters a text of so many tokens can have at most, by the rules of a tokenizer."""

from __future__ import annotations

import json
from typing import Any

from hone.model.tokenizer import Tokenizer

_KEEPING_PRE = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "FixedLength"}
_COMPOSED = 4
"""Characters that become one in NFC, at most: no canonical decomposition is longer (Unicode Standard Annex 15, table 4)."""


class LengthBound:
    """`holds(text, tokens)`: whether the text can have at most that many tokens; unknown rules never refuse a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        rules = json.loads(tokenizer.core.to_str())
        self.chars_per_token = _chars_per_token(rules)
        self._strips = any(token["lstrip"] or token["rstrip"] for token in rules["added_tokens"])

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least."""
        if self.chars_per_token is None:
            return 0
        # An added token that strips swallows any amount of white space beside it.
        counted = sum(map(len, text.split())) if self._strips else len(text)
        return -(-counted // self.chars_per_token)


def _chars_per_token(rules: dict[str, Any]) -> int | None:
    """Most characters of a text that one token stands for; None where tokens may stand for any number."""
    model = rules["model"]
    shrinks = [_shrinks(step) for step in _flat(rules["normalizer"], "normalizers")]
    splits = _flat(rules["pre_tokenizer"], "pretokenizers")
    if model["type"] != "BPE" or None in shrinks or not all(map(_keeps, splits)):
        return None
    byte_level = any(step["type"] == "ByteLevel" for step in splits)
    if byte_level:
        from hone.model.tokenizer import _BYTE_OF

        needed = set(_BYTE_OF)
    else:
        needed = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else None
    if needed is None or not needed <= set(model["vocab"]):
        return None  # characters without a token are dropped, or any number of them is one unknown token
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in rules["added_tokens"])]))
    factor = 1
    for shrink in shrinks:
        factor *= shrink or 1
    return longest * factor


def _flat(part: dict[str, Any] | None, nested: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for one in part[nested] for step in _flat(one, nested)] if part["type"] == "Sequence" else [part]


def _shrinks(step: dict[str, Any]) -> int | None:
    """Characters that a normalizer may make one of, at most; None: any number."""
    if step["type"] in ("Prepend", "ByteLevel"):
        return 1
    if step["type"] == "NFC":
        return _COMPOSED
    pattern = step.get("pattern", {}).get("String") if step["type"] == "Replace" else None
    return 1 if pattern is not None and len(step["content"]) >= len(pattern) else None


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps every character."""
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPING_PRE
