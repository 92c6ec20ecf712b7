"""One engine step on the device: a forward pass over the scheduled rows' tokens, then their choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.model.decoder import Decoder
from hone.serve.paged import Paged
from hone.serve.pages import KVCache
from hone.serve.sampler import Chosen, Sampler, logprobs
from hone.serve.scheduler import Row, Work
from hone.serve.speculate import Guess, Proposer, verify

_SCORED = 256
"""Prompt positions whose logits exist at once while a prompt is scored."""


@dataclass
class Step:
    """What a step brought for one row: the chosen tokens in order (none in mid-prefill), or what went wrong."""

    row: Row
    computed: int
    chosen: list[Chosen] = field(default_factory=list)
    error: str | None = None


class Runner:
    """Runs work on one model and its cache."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler,
        device: torch.device | str,
        proposer: Proposer | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.device = device
        self.proposer = proposer
        self.num_drafted = self.num_accepted = 0

    def wipe(self, pages: Sequence[int]) -> None:
        """Makes pages finite before their new life, in every cache."""
        self.cache.wipe(pages)
        if self.proposer is not None:
            self.proposer.wipe(pages)

    def run(self, work: Sequence[Work]) -> list[Step]:
        """One step for every item. Never raises for what a single row causes: its Step carries the error."""
        try:
            return self._run(work)
        except Exception as error:
            for item in work:
                item.row.drafted = min(item.row.drafted, item.start)
            if len(work) == 1:
                return [Step(work[0].row, work[0].start, error=f"{type(error).__name__}: {error}")]
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        # A row made the step fail, or it was too large: halves find the row, or fit. Writing the same keys again does
        # no harm, and rows of the half that works lose nothing.
        half = len(work) // 2
        return self.run(work[:half]) + self.run(work[half:])

    def _run(self, work: Sequence[Work]) -> list[Step]:
        guesses = None if self.proposer is None else self.proposer.propose(work)
        x = self.forward(work, guesses)
        steps = [Step(item.row, item.start + item.count) for item in work]
        self._score_prompts(work, guesses, x)
        sampling = [place for place, item in enumerate(work) if item.samples]
        if not sampling:
            return steps
        entries = [work[place].row.entry for place in sampling]
        if guesses is None or not any(guess.tokens for guess in guesses):
            if len(sampling) < len(x):
                ends = torch.tensor([item.count for item in work]).cumsum(0) - 1
                x = x[ends[sampling].to(x.device)]
            for place, chosen in zip(sampling, self.sampler.choose(self.model.head(x), entries)):
                steps[place].chosen = [chosen]
            return steps
        checked = [guesses[place] for place in sampling]
        logits = self.model.head(x[self._checked_places(work, guesses).to(x.device)])
        for place, guess, chosen in zip(sampling, checked, verify(self.sampler, logits, entries, checked)):
            steps[place].chosen = chosen
            self.num_drafted += len(guess.tokens)
            self.num_accepted += len(chosen) - 1
            row = work[place].row
            self.proposer.settle(row, len(row.tokens), len(guess.tokens), len(chosen) - 1)
        return steps

    @staticmethod
    def _checked_places(work: Sequence[Work], guesses: Sequence[Guess]) -> Tensor:
        """Where, among the flat tokens, logits are needed: each sampling row's last token and its guesses."""
        places, begin = [], 0
        for item, guess in zip(work, guesses):
            end = begin + item.count + len(guess.tokens)
            if item.samples:
                places += range(end - len(guess.tokens) - 1, end)
            begin = end
        return torch.tensor(places)

    def forward(self, work: Sequence[Work], guesses: Sequence[Guess] | None = None) -> Tensor:
        """Hidden states [T, D] of all items' tokens and guesses, one item after another."""
        if guesses is None and all(item.count == 1 for item in work):
            pieces = [[item.row.tokens[item.start]] for item in work]
        else:
            pieces = [item.row.tokens[item.start : item.start + item.count] for item in work]
        if guesses is not None:
            pieces = [piece + guess.tokens for piece, guess in zip(pieces, guesses)]
        context = Paged(
            self.cache,
            [item.row.pages for item in work],
            [item.start for item in work],
            [len(piece) for piece in pieces],
            self.device,
        )
        tokens = torch.tensor([token for piece in pieces for token in piece], device=self.device)
        return self.model.hidden(tokens, context)

    def _score_prompts(self, work: Sequence[Work], guesses: Sequence[Guess] | None, x: Tensor) -> None:
        """Fills in log-probabilities of the prompt tokens that follow the ones just computed."""
        begin = 0
        for place, item in enumerate(work):
            row, first = item.row, begin
            begin += item.count + (len(guesses[place].tokens) if guesses is not None else 0)
            if row.prompt_logprobs is None or row.num_output:
                continue
            count = row.request.params.prompt_logprobs or 0
            last = min(item.start + item.count, row.num_prompt - 1)
            for start in range(item.start, last, _SCORED):
                targets = row.tokens[start + 1 : min(start + _SCORED, last) + 1]
                at = first + start - item.start
                logits = self.model.head(x[at : at + len(targets)]).float()
                row.prompt_logprobs[start + 1 : start + 1 + len(targets)] = logprobs(
                    logits, targets, [count] * len(targets)
                )
