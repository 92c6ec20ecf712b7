"""Gives sequences their constraints, and holds those whose grammar is still being compiled out of the schedule."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from hone.base.errors import SpecError
from hone.model.tokenizer import Tokenizer
from hone.serve.request import SamplingParams
from hone.serve.structured.constraint import Constraint
from hone.serve.structured.grammars import Grammars

DEADLINE_S = 30.0
"""Longest wait for a grammar; the first one of a server includes reading the vocabulary (about 2 s of 150,000 tokens)."""

_WAIT_S = 0.05


class Constraints:
    """The constraints of an engine's sequences. Not thread-safe; the grammars are compiled in a thread of their own."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._grammars: Grammars | None = None
        self._compiling: dict[str, tuple[Any, Constraint, Future[Any], float]] = {}

    def of(self, params: SamplingParams, ends: Sequence[int]) -> Constraint | None:
        """The constraint of a request, without its grammar; None when every token is allowed. Raises SpecError."""
        if not params.constrained:
            return None
        if params.allowed_token_ids is not None and not params.allowed_token_ids:
            raise SpecError("allowed_token_ids is empty: nothing could be generated", fix="name at least one token")
        form = params.structured_outputs
        return Constraint(
            self._vocab_size,
            ends=ends,
            min_tokens=params.min_tokens,
            allowed=params.allowed_token_ids,
            bad_words=self._words(params.bad_words),
            begin_after=() if form is None else form.begin_after,
            ignore_eos=params.ignore_eos,
            eos_ids=self._eos_ids,
        )

    def _words(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, at the beginning of a text and after a blank."""
        if not texts:
            return []
        tokenizer = self._needed("bad_words")
        found: list[list[int]] = []
        for text in texts:
            for spelled in (text, " " + text.lstrip()):
                ids = tokenizer.encode(spelled, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _needed(self, name: str) -> Tokenizer:
        if self._tokenizer is None:
            raise SpecError(f"{name} needs a tokenizer", fix="give the engine a tokenizer, or use allowed_token_ids")
        return self._tokenizer

    def hold(self, seq: Any) -> bool:
        """Begins to compile the grammar of a sequence's request; False when it has none or it is known: it may run.

        Raises MissingExtra, and SpecError for a grammar that is known to be wrong.
        """
        form, constraint = seq.request.params.structured_outputs, seq.constraint
        if form is None or constraint is None:
            return False
        if self._grammars is None:
            self._grammars = Grammars(self._needed("structured_outputs"), self._vocab_size, self._eos_ids)
        compiled = self._grammars.compile(form)
        if compiled.done():
            constraint.matcher = compiled.result().deep_copy()
            return False
        seq.state = "compiling"
        self._compiling[seq.request.id] = seq, constraint, compiled, time.monotonic() + DEADLINE_S
        return True

    @property
    def num_held(self) -> int:
        """Sequences whose grammar is not compiled yet."""
        return len(self._compiling)

    def forget(self, name: str) -> None:
        """Ends the wait of a sequence."""
        self._compiling.pop(name, None)

    def ready(self, *, idle: bool) -> list[tuple[Any, str | None]]:
        """The sequences that may run now, or their errors. `idle`: nothing else can run, so wait a moment for one."""
        if not self._compiling:
            return []
        if idle:
            wait([one[2] for one in self._compiling.values()], _WAIT_S, return_when=FIRST_COMPLETED)
        found: list[tuple[Any, str | None]] = []
        for name, (seq, constraint, compiled, deadline) in list(self._compiling.items()):
            if compiled.done():
                error = compiled.exception()
                if error is None:
                    constraint.matcher = compiled.result().deep_copy()
                found.append((seq, None if error is None else getattr(error, "what", str(error))))
            elif time.monotonic() > deadline:
                found.append((seq, f"the grammar was not compiled within {DEADLINE_S:.0f} s"))
            else:
                continue
            del self._compiling[name]
        return found
