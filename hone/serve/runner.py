"""One engine step on the device: a forward pass over the tokens of a `StepInput`, then the choices of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hone.cost.serving import MOST_CAPTURED
from hone.model.decoder import Decoder
from hone.ops.dispatch import say_once
from hone.serve.paging.cache import KVCache, has_softcap
from hone.serve.paging.paged import Paged, PagedBuffers, reads_in_place
from hone.serve.request import TokenLogprob
from hone.serve.sampler import Chosen, Sampler, logprobs
from hone.serve.speculation.drafter import Guess, Guesser, verify
from hone.serve.step import Batch, StepInput

_SCORED = 256
"""Prompt positions whose logits exist at once while a prompt is scored."""


@dataclass
class SeqResult:
    """What a step brought for one sequence.

    `chosen` are its tokens in order (none while its prompt is read): the guesses that were kept and one more.
    `prompt_logprobs` are those of the prompt tokens after the ones just computed. With an `error` nothing else counts.
    """

    chosen: list[Chosen] = field(default_factory=list)
    num_guessed: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


class Runner:
    """Runs steps on one model and its cache. What it computes depends on the steps and the cache alone."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler,
        device: torch.device | str,
        guesser: Guesser | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.device = device
        self.guesser = guesser
        in_place = reads_in_place(cache, device, model.embedding.dtype, softcap=has_softcap(model.config))
        self.graphs = DecodeGraphs(model, cache, device) if in_place else None
        """Runs decode steps; None: every step is launched kernel by kernel."""

    @torch.inference_mode()
    def run(self, step: StepInput) -> list[SeqResult]:
        """A result for every sequence. Never raises for what a single sequence causes: its result carries the error."""
        self.cache.wipe(step.fresh_pages)
        if self.guesser is not None:
            self.guesser.cache.wipe(step.fresh_pages)
        return self._halved(step) if step.num_seqs else []

    def _halved(self, step: StepInput) -> list[SeqResult]:
        """Runs the step; one that fails is run in halves, until the sequence that makes it fail is alone, or it fits.

        Writing the same keys again does no harm, and sequences of the half that works lose nothing.
        """
        try:
            return self._run(step)
        except Exception as error:
            if step.num_seqs == 1:
                return [SeqResult(error=f"{type(error).__name__}: {error}")]
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        half = step.num_seqs // 2
        return self._halved(step.part(0, half)) + self._halved(step.part(half, step.num_seqs))

    def _run(self, step: StepInput) -> list[SeqResult]:
        guesses = self._guesses(step)
        x = self.forward(step.batch if guesses is None else _with_guesses(step, guesses))
        results = [SeqResult(num_guessed=count) for count in step.num_guesses.tolist()]  # while the device computes
        self._score_prompts(step, x, results)
        sampling = step.sampled
        if not sampling:
            return results
        parameters = step.sampling if len(sampling) == step.num_seqs else step.sampling.take(sampling)
        if guesses is None:
            if len(sampling) < len(x):
                x = x[torch.from_numpy(step.batch.last_places()[sampling]).to(x.device)]
            for place, chosen in zip(sampling, self.sampler.choose(self.model.head(x), parameters)):
                results[place].chosen = [chosen]
            return results
        # Logits are needed after each sampling sequence's last token and after each of its guesses.
        last = step.batch.last_places()
        places = [np.arange(last[place] - step.num_guesses[place], last[place] + 1) for place in sampling]
        logits = self.model.head(x[torch.from_numpy(np.concatenate(places)).to(x.device)])
        checked = verify(self.sampler, logits, parameters, [guesses[place] for place in sampling])
        for place, chosen in zip(sampling, checked):
            results[place].chosen = chosen
        return results

    def _guesses(self, step: StepInput) -> list[Guess] | None:
        """Each sequence's guesses; None when no sequence has any. The draft model computes its tokens in any case."""
        guesses = self.guesser.guess(step) if self.guesser is not None and len(step.draft_tokens) else None
        if not step.any_guesses:
            return None
        if guesses is None:
            ends = step.batch.last_places() + 1
            tokens = step.batch.tokens
            guesses = [Guess(tokens[end - count : end].tolist()) for end, count in zip(ends, step.num_guesses)]
        return guesses

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, D] of the batch's tokens."""
        if self.graphs is not None and len(batch.tokens) == batch.num_seqs:
            hidden = self.graphs.hidden(batch)
            if hidden is not None:
                return hidden
        context = Paged(self.cache, batch, self.device)
        return self.model.hidden(context.tokens, context)

    def _score_prompts(self, step: StepInput, x: Tensor, results: Sequence[SeqResult]) -> None:
        """Log-probabilities of the prompt tokens that follow the ones just computed, where they are asked for."""
        if not step.scored:
            return
        begins = step.batch.last_places() + 1 - step.batch.lengths
        for place in step.scored:
            begin, count = int(begins[place]), int(step.score_counts[place])
            own = step.batch.tokens[begin : begin + int(step.batch.lengths[place])].tolist()
            targets = own[1:] + [token for token in (int(step.next_tokens[place]),) if token >= 0]
            for start in range(0, len(targets), _SCORED):
                some = targets[start : start + _SCORED]
                logits = self.model.head(x[begin + start : begin + start + len(some)]).float()
                results[place].prompt_logprobs += logprobs(logits, some, [count] * len(some))


def _with_guesses(step: StepInput, guesses: Sequence[Guess]) -> Batch:
    """The step's tokens with the guesses at their places."""
    tokens = step.batch.tokens.copy()
    for end, guess in zip(step.batch.last_places() + 1, guesses):
        tokens[end - len(guess.tokens) : end] = guess.tokens
    return replace(step.batch, tokens=tokens)


def padded(num_seqs: int) -> int:
    """The sequences of the graph that serves `num_seqs`: a power of 2 up to 8, then a multiple of 8 or of a sixteenth."""
    above = 1 << (num_seqs - 1).bit_length()
    step = max(8, above // 16)
    return above if num_seqs <= 8 else -(-num_seqs // step) * step


@dataclass
class _Captured:
    buffers: PagedBuffers
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    tables: list[tuple[Tensor, Tensor]]  # the rotary tables it reads; the cache may replace its own


class DecodeGraphs:
    """Runs a model over sequences of one new token each by replaying captured passes, one for each padded number of them.

    A decode step of a small model is hundreds of kernels of a few microseconds: launching them one by one takes longer
    than they run. The paged kernels find their work on the device, so a graph depends on the number of sequences alone.
    """

    def __init__(self, model: Decoder, cache: KVCache, device: torch.device | str) -> None:
        self._model, self._cache, self._device = model, cache, torch.device(device)
        self._longest = min(model.config.max_seq_len, cache.num_pages * cache.block_size)
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._broken = False

    def hidden(self, batch: Batch) -> Tensor | None:
        """Hidden states [S, D], valid until the next call; None for a step that must run without a graph."""
        count = padded(batch.num_seqs)
        if self._broken or count > MOST_CAPTURED or batch.ends.max() > self._longest:
            return None
        if count not in self._captured and not self._capture(count):
            return None
        step = self._captured[count]
        step.buffers.fill(batch)
        step.graph.replay()
        return step.hidden[: batch.num_seqs]

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
