"""One engine step on the device: a forward pass over the scheduled rows' tokens, then their choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.model.decoder import Decoder
from hone.ops.dispatch import say_once
from hone.serve.paged import Paged, PagedBuffers, reads_in_place
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
        self.graphs = DecodeGraphs(model, cache, device) if reads_in_place(cache, device) else None
        """Runs decode steps; None: every step is launched kernel by kernel."""

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
            if self.graphs is not None:
                tokens, starts = [piece[0] for piece in pieces], [item.start for item in work]
                hidden = self.graphs.hidden(tokens, starts, [item.row.pages for item in work])
                if hidden is not None:
                    return hidden
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


MOST_ROWS = 512
"""Rows up to which decode steps are captured: with more, kernels run longer than launching them takes."""


def padded(num_rows: int) -> int:
    """The rows of the graph that serves `num_rows`: a power of 2 up to 8, then a multiple of 8 or of a sixteenth."""
    above = 1 << (num_rows - 1).bit_length()
    step = max(8, above // 16)
    return above if num_rows <= 8 else -(-num_rows // step) * step


@dataclass
class _Captured:
    buffers: PagedBuffers
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    tables: list[tuple[Tensor, Tensor]]  # the rotary tables it reads; the cache may replace its own


class DecodeGraphs:
    """Runs a model over rows of one new token each by replaying captured passes, one for each padded number of rows.

    A decode step of a small model is hundreds of kernels of a few microseconds: launching them one by one takes longer
    than they run. The paged kernels find their work on the device, so a graph depends on the number of rows alone.
    """

    def __init__(self, model: Decoder, cache: KVCache, device: torch.device | str) -> None:
        self._model, self._cache, self._device = model, cache, torch.device(device)
        self._longest = min(model.config.max_seq_len, cache.num_pages * cache.page_size)
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._broken = False

    def hidden(self, tokens: Sequence[int], starts: Sequence[int], pages: Sequence[Sequence[int]]) -> Tensor | None:
        """Hidden states [R, D], valid until the next call; None for a step that must run without a graph."""
        count = padded(len(tokens))
        if self._broken or count > MOST_ROWS or max(starts) >= self._longest:
            return None
        if count not in self._captured and not self._capture(count):
            return None
        step = self._captured[count]
        step.buffers.fill(tokens, starts, pages)
        step.graph.replay()
        return step.hidden[: len(tokens)]

    def _capture(self, count: int) -> bool:
        buffers = PagedBuffers(self._cache, count, self._longest, self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles kernels and sets libraries up before the capture
                self._model.hidden(buffers.tokens, buffers)
            torch.cuda.current_stream().wait_stream(side)
            buffers.forget()
            with torch.cuda.graph(graph, pool=self._pool):
                hidden = self._model.hidden(buffers.tokens, buffers)
        except RuntimeError as error:
            self._broken = True
            say_once(f"decode steps run without CUDA graphs: {str(error).splitlines()[0]}")
            return False
        self._captured[count] = _Captured(buffers, graph, hidden, list(self._cache.tables.values()))
        return True
