"""A draft model at work: which sequences it reads and guesses for, and its passes, one a guessed token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hone.serve.paging.cache import KVCache, cache_tensors
from hone.serve.paging.paged import Paged
from hone.serve.sequence import ScheduledSeq
from hone.serve.speculation.drafter import DraftSetting, Guess, Proposer
from hone.serve.step import ForwardBatch, StepInput


class DraftProposer(Proposer):
    """Chooses the tokens that the draft model reads in a step, and the sequences that it guesses for.

    A pass of the draft model has at most `max_num_batched_tokens` tokens, as one of the model. A sequence that has decoded
    without guesses for long (too many sequences ran) is read over several steps before it gets guesses.
    """

    uses_pages = True

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._budget = max_num_batched_tokens

    def propose(self, scheduled: Sequence[ScheduledSeq]) -> None:
        # A sequence without guesses is read by the draft model only when it gets guesses again.
        reading = [item for item in scheduled if item.lookahead or not item.samples or item.count > 1]
        for item, count in zip(reading, self._shares([_unread(item) for item in reading])):
            item.draft_start, item.draft_count = item.seq.drafted, count
            if count and count == _unread(item):
                item.num_guesses = item.lookahead

    def _shares(self, wants: Sequence[int]) -> list[int]:
        """The tokens of the budget for each sequence's demand: small demands first, so that most sequences get guesses."""
        shares, left = [0] * len(wants), self._budget
        for index in sorted(range(len(wants)), key=wants.__getitem__):
            shares[index] = min(wants[index], left)
            left -= shares[index]
        return shares

    def settle(self, item: ScheduledSeq, num_kept: int) -> None:
        if item.draft_count:
            item.seq.drafted = item.draft_start + item.draft_count
        if item.num_guesses:  # the draft model has not read the last guess; keys of rejected guesses are invalid
            item.seq.drafted = item.start + item.count + min(num_kept, item.num_guesses - 1)


@dataclass
class _Guessing:
    """A sequence with guesses: its place in the step, the number of guesses, and the guesses so far."""

    index: int
    wanted: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


class DraftRunner:
    """The draft model with its cache: reads the step's draft tokens, then guesses one token per round."""

    def __init__(self, setting: DraftSetting) -> None:
        draft = setting.draft
        assert draft is not None, "a draft model is needed"
        self._draft = draft
        self._sampler = setting.sampler
        self._device = setting.device
        self.cache = KVCache(
            cache_tensors(draft.config),
            setting.num_pages,
            setting.block_size,
            dtype=setting.cache_dtype or draft.dtype,
            device=setting.device,
            rope_len=setting.max_model_len,
        )

    def guess(self, step: StepInput) -> list[Guess]:
        """A guess of `num_guesses` tokens for each sequence of the step."""
        guesses = [Guess() for _ in range(step.num_seqs)]
        reading = np.flatnonzero(step.draft_lengths)
        if not len(reading):
            return guesses
        lengths = step.draft_lengths[reading]
        x = self._read(step, reading, step.draft_starts[reading], lengths, step.draft_tokens)
        last = np.cumsum(lengths, dtype=np.int64) - 1
        chosen = np.flatnonzero(step.num_guesses[reading])
        active = [_Guessing(int(reading[n]), int(step.num_guesses[reading[n]])) for n in chosen]
        x = x[torch.from_numpy(last[chosen]).to(x.device)]
        everyone = active
        for ahead in range(int(step.num_guesses.max())):
            if ahead:
                active = [one for one in active if one.wanted > ahead]
                indices = np.array([one.index for one in active])
                starts = step.sampling.position[indices] + ahead - 1
                x = self._read(step, indices, starts, np.ones_like(indices), [one.tokens[-1] for one in active])
            self._guess(x, active, step, ahead)
        for one in everyone:
            guesses[one.index] = Guess(one.tokens, torch.stack(one.probs) if one.probs else None)
        return guesses

    def _read(
        self, step: StepInput, indices: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: Sequence[int]
    ) -> Tensor:
        batch = ForwardBatch.of(tokens, starts, lengths, step.batch.table[indices], self.cache.block_size)
        context = Paged(self.cache, batch, self._device)
        return self._draft.hidden(context.tokens, context)

    def _guess(self, x: Tensor, active: Sequence[_Guessing], step: StepInput, ahead: int) -> None:
        """One more token for each of `active`; for sampled ones also the probabilities it was drawn from."""
        sampler, sampling = self._sampler, step.sampling.take([one.index for one in active], ahead)
        logits = sampler.process(self._draft.head(x).float(), sampling)
        tokens = logits.argmax(-1).tolist()
        drawing = np.flatnonzero(~sampling.greedy).tolist()
        if drawing:
            drawn = sampling.take(drawing)
            filtered = sampler.filter(logits[drawing], drawn)
            ends = (filtered + sampler.noise(drawn)).argmax(-1).tolist()
            for index, token, q in zip(drawing, ends, filtered.softmax(-1)):
                tokens[index] = token
                active[index].probs.append(q)
        for one, token in zip(active, tokens):
            one.tokens.append(token)


def _unread(item: ScheduledSeq) -> int:
    """Number of tokens up to the end of the item that the draft model has not read."""
    return item.start + item.count - item.seq.drafted
