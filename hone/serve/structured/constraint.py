"""What one sequence may generate next, as a bit mask: by a grammar, a list of allowed tokens, and banned words."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hone.base.errors import SpecError

MASK_S = 1.0
"""Longest time for one mask; usual are 20 to 100 microseconds."""


def num_words(vocab_size: int) -> int:
    """int32 words of a mask over a vocabulary."""
    return -(-vocab_size // 32)


def mask_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)] with the bits of `tokens`."""
    bits = np.zeros(32 * num_words(vocab_size), dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Constraint:
    """The state of one sequence's constraints: `fill` gives the mask of the next token, `accept` takes the one chosen.

    `matcher` is llguidance's, None without a grammar; it holds from `begin_after` (tokens) on. `ends` are the tokens
    that end the sequence: they are banned below `min_tokens`, and with `ignore_eos` while a grammar allows others.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        ends: Sequence[int] = (),
        min_tokens: int = 0,
        allowed: Sequence[int] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        begin_after: Sequence[int] = (),
        ignore_eos: bool = False,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.matcher: Any = None
        self.suspected = False
        """Whether masks were slow when it was among those asked together."""
        self.fits = any(one < vocab_size for one in eos_ids)
        """Whether llguidance's masks are as wide as the model's: without an end it has a token more."""
        self._vocab_size = vocab_size
        self._allowed = None if allowed is None else mask_of(allowed, vocab_size)
        self._bad_words = [tuple(word) for word in bad_words if word]
        self._begin_after = list(begin_after)
        self._ends = mask_of(ends, vocab_size)
        self._eos = mask_of((one for one in eos_ids if one < vocab_size), vocab_size) if ignore_eos else None
        self._min_tokens = min_tokens
        self._made: list[int] = []
        self._last_word = np.int32((1 << vocab_size % 32) - 1 if vocab_size % 32 else -1)

    @property
    def num_words(self) -> int:
        """int32 words of its masks."""
        return num_words(self._vocab_size)

    @property
    def is_done(self) -> bool:
        """True when the grammar is complete: nothing but the end may follow."""
        return self.matcher is not None and not self._begin_after and bool(self.matcher.is_stopped())

    @property
    def asks(self) -> bool:
        """Whether the grammar has a part in the next mask."""
        return self.matcher is not None and not self._begin_after

    def fill(self, row: np.ndarray, *, asked: bool = False) -> None:
        """Writes the mask of the next token into `row`, int32 [ceil(V / 32)]. Changes no state.

        `asked`: `row` has the grammar's mask already. Raises SpecError when the constraints together leave no token, or the grammar needs more work for one token
        than its limits allow.
        """
        if not self.asks:
            row[:] = -1
        elif not asked:
            self._ask(row)
        if self.asks:
            self._check(row)
        if self._allowed is not None:
            row &= self._allowed
        for word in self._bad_words:
            *before, last = word
            if not before or self._made[-len(before) :] == before:
                row[last // 32] &= np.int32(~(1 << last % 32) if last % 32 < 31 else 2**31 - 1)
        for banned in (self._ends if len(self._made) < self._min_tokens else None, self._eos if self.matcher else None):
            if banned is not None and (row & ~banned).any():
                row &= ~banned
        if not row.any():
            raise SpecError(
                "the grammar, allowed_token_ids and bad_words together leave no token to generate",
                fix="allow the tokens that the grammar needs, or leave one of them out",
            )

    def _ask(self, row: np.ndarray) -> None:
        began = time.perf_counter()
        found = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.int32)
        if time.perf_counter() - began > MASK_S:  # once, because every sequence of the step waits for it
            raise SpecError(
                f"the grammar took more than {MASK_S} s for one token", fix="write it with fewer alternatives"
            )
        row[:] = found[: len(row)]  # llguidance may know one token more than the model: the end that it needs

    def _check(self, row: np.ndarray) -> None:
        if self.matcher.is_error():
            text = " ".join(self.matcher.get_error().split())
            raise SpecError(f"the grammar failed: {text[:300]}", fix="simplify the grammar or the schema")
        row[-1] &= self._last_word

    def accept(self, token: int) -> None:
        """Takes the token that was chosen under the last mask. Raises ArithmeticError for one outside of it: a bug."""
        self._made.append(token)
        if self.matcher is None:
            return
        if self._begin_after:
            if self._made[-len(self._begin_after) :] == self._begin_after:
                self._begin_after = []
            return
        if not self.matcher.consume_token(token):
            text = " ".join(self.matcher.get_error().split())
            raise ArithmeticError(f"token {token} is not in the mask of the grammar: {text[:200]}")
