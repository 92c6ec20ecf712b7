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

    def __init__(self, model: Decoder, cache: KVCache, sampler: Sampler, device: torch.device | str) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.device = device

    def run(self, work: Sequence[Work]) -> list[Step]:
        """One step for every item. Never raises for what a single row causes: its Step carries the error."""
        try:
            return self._run(work)
        except Exception as error:
            if len(work) == 1:
                return [Step(work[0].row, work[0].start, error=f"{type(error).__name__}: {error}")]
        # Somebody's row made the step fail: alone, only that row fails. Writing the same keys again does no harm.
        return [step for item in work for step in self.run([item])]

    def _run(self, work: Sequence[Work]) -> list[Step]:
        x = self.forward(work)
        sampling = [item for item in work if item.samples]
        steps = [Step(item.row, item.start + item.count) for item in work]
        self._score_prompts(work, x)
        if not sampling:
            return steps
        if len(sampling) < len(work) or len(work) < len(x):
            ends = torch.tensor([item.count for item in work]).cumsum(0) - 1
            x = x[ends[[place for place, item in enumerate(work) if item.samples]].to(x.device)]
        chosen = iter(self.sampler.choose(self.model.head(x), [item.row.entry for item in sampling]))
        for item, step in zip(work, steps):
            if item.samples:
                step.chosen.append(next(chosen))
        return steps

    def forward(self, work: Sequence[Work]) -> Tensor:
        """Hidden states [T, D] of all items' tokens, one item after another."""
        if all(item.count == 1 for item in work):
            tokens = [item.row.tokens[item.start] for item in work]
        else:
            tokens = [token for item in work for token in item.row.tokens[item.start : item.start + item.count]]
        context = Paged(
            self.cache,
            [item.row.pages for item in work],
            [item.start for item in work],
            [item.count for item in work],
            self.device,
        )
        return self.model.hidden(torch.tensor(tokens, device=self.device), context)

    def _score_prompts(self, work: Sequence[Work], x: Tensor) -> None:
        """Fills in log-probabilities of the prompt tokens that follow the ones just computed."""
        begin = 0
        for item in work:
            row, begin, first = item.row, begin + item.count, begin
            if row.prompt_logprobs is None or row.num_output:
                continue
            count = row.request.params.prompt_logprobs or 0
            last = min(item.start + item.count, row.num_prompt - 1)
            for start in range(item.start, last, _SCORED):
                targets = row.tokens[start + 1 : min(start + _SCORED, last) + 1]
                place = first + start - item.start
                logits = self.model.head(x[place : place + len(targets)]).float()
                row.prompt_logprobs[start + 1 : start + 1 + len(targets)] = logprobs(
                    logits, targets, [count] * len(targets)
                )
