"""Drafter: a small model of the same vocabulary guesses, with keys of its own under the big model's page numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.serve.speculate import Drafter, Guess

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.decoder import Decoder
    from hone.serve.sampler import Sampler
    from hone.serve.scheduler import Row, Work

torch = lazy("torch")


class DraftModel(Drafter):
    """Guess with a smaller model, check with the big one. Leviathan et al. 2023, arXiv:2211.17192."""

    paper: ClassVar[str] = "arXiv:2211.17192"
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})

    def open(
        self,
        model: Decoder,
        draft: Decoder | None,
        sampler: Sampler,
        num_pages: int,
        page_size: int,
        token_budget: int,
        device: Any,
    ) -> DraftProposer:
        assert draft is not None, "a draft model is needed"
        if draft.config.vocab_size != model.config.vocab_size:
            raise SpecError(
                f"the draft model has {draft.config.vocab_size} tokens, the model has {model.config.vocab_size}",
                fix="use a draft model with the same tokenizer",
            )
        return DraftProposer(draft, sampler, num_pages, page_size, token_budget, device)


class DraftProposer:
    """The draft model with its cache. A row's keys are in it for its first `drafted` tokens.

    A pass of it takes at most `token_budget` tokens, as one of the model does. A row that decoded without guessing for
    long (too many others did) catches up over several steps and guesses once it has.
    """

    uses_pages = True

    def __init__(
        self, draft: Decoder, sampler: Sampler, num_pages: int, page_size: int, token_budget: int, device: Any
    ) -> None:
        from hone.serve.pages import KVCache
        from hone.serve.sizing import kv_shapes

        self._draft = draft
        self._sampler = sampler
        self._token_budget = token_budget
        self._device = device
        self._cache = KVCache(kv_shapes(draft.config), num_pages, page_size, dtype=draft.embedding.dtype, device=device)
        self.cache_bytes = self._cache.num_bytes

    def wipe(self, pages: Sequence[int]) -> None:
        self._cache.wipe(pages)

    def propose(self, work: Sequence[Work]) -> list[Guess]:
        """Reads what the rows have that the draft has not seen (their prompts' next chunk too), then guesses in rounds.

        What does not fit into the token budget is read in later steps; its rows do not guess before.
        """
        guesses = [Guess() for _ in work]
        # A row that decodes without guessing catches up when it guesses again.
        reading = [place for place, item in enumerate(work) if item.lookahead or not item.samples or item.count > 1]
        counts = self._shares([_unread(work[place]) for place in reading])
        reading, counts = [place for place, count in zip(reading, counts) if count], [n for n in counts if n]
        if not reading:
            return guesses
        rows = [work[place].row for place in reading]
        pieces = [row.tokens[row.drafted : row.drafted + count] for row, count in zip(rows, counts)]
        x = self._read(rows, [row.drafted for row in rows], pieces)
        for row, count in zip(rows, counts):
            row.drafted += count
        last = torch.tensor(counts).cumsum(0) - 1
        active = [(n, place) for n, place in enumerate(reading) if work[place].lookahead and not _unread(work[place])]
        probs: dict[int, list[Tensor]] = {place: [] for _, place in active}
        if active:
            x = x[last[[order for order, _ in active]].to(x.device)]
        step = 0
        while active:
            self._guess(x, [(work[place], guesses[place], probs[place]) for _, place in active], step)
            step += 1
            active = [(order, place) for order, place in active if work[place].lookahead > step]
            if active:
                rows = [work[place].row for _, place in active]
                starts = [len(row.tokens) + step - 1 for row in rows]
                x = self._read(rows, starts, [[guesses[place].tokens[-1]] for _, place in active])
        for place, found in probs.items():
            if found:
                guesses[place].probs = torch.stack(found)
        return guesses

    def _shares(self, wants: Sequence[int]) -> list[int]:
        """How many tokens of each want the budget covers: small wants first, so that most rows guess."""
        shares, left = [0] * len(wants), self._token_budget
        for place in sorted(range(len(wants)), key=wants.__getitem__):
            shares[place] = min(wants[place], left)
            left -= shares[place]
        return shares

    def _read(self, rows: Sequence[Row], starts: Sequence[int], pieces: Sequence[list[int]]) -> Tensor:
        from hone.serve.paged import Paged

        context = Paged(
            self._cache, [row.pages for row in rows], starts, [len(piece) for piece in pieces], self._device
        )
        tokens = torch.tensor([token for piece in pieces for token in piece], device=self._device)
        return self._draft.hidden(tokens, context)

    def _guess(self, x: Tensor, items: list[tuple[Work, Guess, list[Tensor]]], step: int) -> None:
        """One more token for each item; sampled rows keep the probabilities it was drawn from."""
        sampler = self._sampler
        entries = [replace(item.row.entry, ahead=step) for item, _, _ in items]
        logits = self._draft.head(x)
        if all(entry.chooser.plain for entry in entries):
            for (_, guess, _), token in zip(items, logits.argmax(-1).tolist()):
                guess.tokens.append(token)
            return
        logits = sampler.process(logits.float(), entries)
        tokens = logits.argmax(-1).tolist()
        drawing = [place for place, entry in enumerate(entries) if not entry.chooser.params.greedy]
        if drawing:
            drawn = [entries[place] for place in drawing]
            filtered = sampler.filter(logits[drawing], drawn)
            ends = (filtered + sampler.noise(drawn)).argmax(-1).tolist()
            for place, token, q in zip(drawing, ends, filtered.softmax(-1)):
                tokens[place] = token
                items[place][2].append(q)
        for (_, guess, _), token in zip(items, tokens):
            guess.tokens.append(token)

    def settle(self, row: Row, length: int, num_guessed: int, num_kept: int) -> None:
        if num_guessed:  # the last guess was never read, refused ones were read in vain
            row.drafted = length + min(num_kept, num_guessed - 1)


def _unread(work: Work) -> int:
    """Tokens up to the end of `work` that the draft model has not read."""
    return work.start + work.count - work.row.drafted
