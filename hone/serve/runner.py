"""One engine step on the device: a forward pass over the tokens of a `StepInput`, then the choices of its sequences.

`launch` returns as soon as the step is on its way; a later step may be launched before the choices are read, and takes
tokens that the host does not know yet from the device (`ForwardBatch.sources`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hone.model.decoder import Decoder
from hone.serve.adapters.registry import Adapters
from hone.serve.device.graphs import StepGraphs, padded
from hone.serve.device.placing import Placer
from hone.serve.offload.experts import CacheCounts
from hone.serve.paging.cache import KVCache, has_softcap
from hone.serve.paging.paged import BlockTable, Paged, known_tokens, reads_in_place
from hone.serve.ranks.errors import RankError
from hone.serve.request import TokenLogprob
from hone.serve.sampler import SampledToken, Sampler, SamplerOutput, TokenLogprobs
from hone.serve.speculation.drafter import Drafter, Guess, Guesser, HiddenGuesser, Passed
from hone.serve.speculation.rounds import Rounds, RoundsOutput
from hone.serve.speculation.verification import verify
from hone.serve.step import ForwardBatch, StepInput

Masks = Callable[[], np.ndarray]
"""Gives int32 [M, ceil(V / 32)]: a step's masks of the tokens that may be chosen, by `SamplingMetadata.mask_row`."""

_SCORED = 256
"""Prompt positions whose logits exist at once while a prompt is scored."""


@dataclass
class SeqResult:
    """What a step brought for one sequence.

    `chosen` are its tokens in order (none while its prompt is read): the guesses that were kept and one more.
    `prompt_logprobs` are those of the prompt tokens after the ones just computed. With an `error` nothing else counts.
    """

    chosen: list[SampledToken] = field(default_factory=list)
    num_guessed: int = 0
    num_verified: int = 0  # passes that verified guesses
    num_kept: int = 0  # guesses among `chosen`
    guesses: list[int] = field(
        default_factory=list
    )  # of the tokens after `chosen`, by a drafter that reads hidden states
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    states: np.ndarray | None = None  # float32 [D], of a request with pooling
    error: str | None = None

    @classmethod
    def of(cls, token: int | None) -> SeqResult:
        """The result that `Launched.tokens` tells in short."""
        return cls([] if token is None else [SampledToken(token, token >= 0)])


@dataclass
class _Part:
    """A run of a step's sequences on its way: their results, but for the choices that are still on the device."""

    num_seqs: int
    results: list[SeqResult] | None = None  # one each where some are known already
    drawn: SamplerOutput | None = None
    indices: list[int] = field(default_factory=list)  # of the sequences, those of `drawn`
    rounds: RoundsOutput | None = None
    kept: bool = False  # whether the drawn tokens are already where the next step finds them
    scores: list[tuple[int, TokenLogprobs, list[int]]] = field(default_factory=list)  # place, scores, tokens
    states: Tensor | None = None  # float32 [N, D] on the host once the device is done
    pooled: list[int] = field(default_factory=list)  # of the sequences, those of `states`

    def known(self) -> list[SeqResult]:
        """The results as far as they are known, one each."""
        if self.results is None:
            self.results = [SeqResult() for _ in range(self.num_seqs)]
        return self.results

    @property
    def plain(self) -> bool:
        """Whether drawn tokens are all that there is."""
        only_tokens = self.drawn is None or self.drawn.plain
        return only_tokens and self.results is self.rounds is None and not self.scores and self.states is None

    def tokens(self) -> list[int | None]:
        """The token of each sequence of a plain part, None where none was drawn."""
        if self.drawn is None:
            return [None] * self.num_seqs
        tokens = self.drawn.told()
        if len(tokens) == self.num_seqs:
            return tokens
        each: list[int | None] = [None] * self.num_seqs
        for index, token in zip(self.indices, tokens):
            each[index] = token
        return each

    def read(self) -> list[SeqResult]:
        """All results; the first call waits for the device."""
        results = self.known()
        if self.drawn is not None:
            for index, chosen in zip(self.indices, self.drawn.read()):
                results[index].chosen = [chosen]
        if self.rounds is not None:
            for result, (tokens, guessed, verified, guesses) in zip(results, self.rounds.read(), strict=True):
                result.chosen, result.num_guessed, result.num_verified = tokens, guessed, verified
                result.num_kept, result.guesses = len(tokens) - self.rounds.count, guesses
        for index, scores, tokens in self.scores:
            results[index].prompt_logprobs += scores.read(tokens)
        if self.states is not None:
            for index, row in zip(self.pooled, self.states.cpu().numpy()):
                results[index].states = row
        self.drawn, self.rounds, self.scores, self.states = None, None, [], None
        return results


class Launched:
    """A step on its way."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    @property
    def errors(self) -> dict[int, str]:
        """The errors that are known before the device is done, by place."""
        errors, first = {}, 0
        for part in self._parts:
            for index, result in enumerate(part.results or ()):
                if result.error is not None:
                    errors[first + index] = result.error
            first += part.num_seqs
        return errors

    def tokens(self) -> list[int | None] | None:
        """The token of each sequence (None: it got none, -1: its logits are not finite), once the device has computed it.

        None where `results` tells more than that.
        """
        if not all(part.plain for part in self._parts):
            return None
        return [token for part in self._parts for token in part.tokens()]

    def results(self) -> list[SeqResult]:
        """A result for every sequence, once the device has computed it."""
        return [result for part in self._parts for result in part.read()]


class Runner:
    """Runs steps on one model and its cache. What it computes depends on the steps and the cache alone."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn here."""
        return True

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler,
        device: torch.device | str,
        guesser: Guesser | None = None,
        *,
        hidden_guesser: HiddenGuesser | None = None,
        drafter: Drafter | None = None,
        max_num_seqs: int = 512,
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.cache = cache
        self.sampler = sampler
        self.device = torch.device(device)
        self.guesser = guesser
        self.hidden_guesser = hidden_guesser
        self._taps = () if hidden_guesser is None else hidden_guesser.taps
        self._tapped: dict[int, Tensor | None] = {}
        """Hidden states [T, D] of the last pass after the layers that `hidden_guesser` reads."""
        self._placer = Placer(device)
        self._masks: Masks | None = None
        self._last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """The token of each place that the last launched step sampled."""
        self.experts: CacheCounts | None = None
        """What happened to the caches of experts, where these are in host memory."""
        self.graphs: StepGraphs | None = None
        """Replays steps; None: every step is launched kernel by kernel."""
        self.rounds: Rounds | None = None  # graphs that verify, and guess on
        self._table: BlockTable | None = None
        self._wipes = True
        self._whole = True
        """Whether the step runs at once, not in halves."""
        if reads_in_place(cache, device, model.dtype, softcap=has_softcap(model.config)):
            longest = min(cache.rope_len or model.config.max_seq_len, cache.num_pages * cache.block_size)
            self._table = BlockTable(max_num_seqs, -(-longest // cache.block_size), self.device)
            draws = self.samples and hidden_guesser is None
            options = {"draws": draws, "taps": self._taps, "adapters": adapters}
            self.graphs = StepGraphs(model, cache, self._table.tensor, self._last, device, **options)
            self._wipes = False  # these kernels never read slots that no token was written to
            if drafter is not None and all(reads_in_place(one, device, model.dtype) for one in self.draft_caches):
                self.rounds = Rounds(model, cache, self._table.tensor, longest, drafter, hidden_guesser)

    @property
    def draft_caches(self) -> list[KVCache]:
        """The cache that a drafter keeps beside the model's, if it keeps one."""
        kept = (self.guesser, self.hidden_guesser)
        return [one.cache for one in kept if one is not None and one.cache is not None]

    def run(self, step: StepInput, masks: Masks | None = None) -> list[SeqResult]:
        """A result for every sequence. Never raises for what a single sequence causes: its result carries the error."""
        return self.launch(step, masks).results()

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Prepares later steps while there is no work (a CUDA graph more); False when nothing is left to prepare."""
        return any(one.capture_next() for one in (self.rounds, self.graphs) if one is not None)

    def when_lost(self, say: Callable[[RankError], None]) -> None:
        """See `Engine.when_lost`; one process loses no other."""

    def close(self) -> None:
        """Ends what runs beside this process: nothing."""

    @torch.inference_mode()
    def launch(self, step: StepInput, masks: Masks | None = None) -> Launched:
        """Starts a step; `Launched.results` waits for it. Errors as in `run`.

        `masks`, where sequences have some, is asked for them when the forward pass is on its way: they may depend on the
        tokens of the step before, which the host then reads.
        """
        self._masks, self.sampler.masks = masks, None
        if self._wipes or self.guesser is not None:
            self.cache.wipe(step.new_pages)
        for cache in self.draft_caches:
            cache.wipe(step.new_pages)
        self.sampler.seat(step.sampling)
        parts = self._halved(step) if step.num_seqs else []
        first = 0
        for part in parts:  # only now: every part reads the tokens of the step before
            if part.drawn is not None and not part.kept:
                self._keep([first + index for index in part.indices], part.drawn.tokens)
            first += part.num_seqs
        return Launched(parts)

    def _keep(self, indices: list[int], tokens: Tensor) -> None:
        """Leaves sampled tokens where the next step finds them."""
        first, count = indices[0], len(indices)
        if indices[-1] - first == count - 1:
            self._last[first : first + count].copy_(tokens)
        else:
            self._last[self._placer.place({"places": np.array(indices)})["places"]] = tokens

    def _halved(self, step: StepInput) -> list[_Part]:
        """Runs the step; one that fails is run in halves, until the sequence that makes it fail is alone, or it fits.

        Writing the same keys again does no harm, and sequences of the half that works lose nothing.
        """
        try:
            return [self._run(step)]
        except Exception as error:
            if self._table is not None:
                self._table.forget()
            if step.num_seqs == 1:
                return [_Part(1, [SeqResult(error=f"{type(error).__name__}: {error}")])]
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        half, before = step.num_seqs // 2, self._whole
        self._whole = False  # a graph would leave its tokens where the other half reads those of the last step
        try:
            return self._halved(step.part(0, half)) + self._halved(step.part(half, step.num_seqs))
        finally:
            self._whole = before

    def _run(self, step: StepInput) -> _Part:
        drawn = self._replayed(step)
        if drawn is not None:
            return _Part(step.num_seqs, None, drawn, step.sampled, kept=True)
        guesses = self._guesses(step)
        rounds = self._in_rounds(step, guesses)
        if rounds is not None:
            return _Part(step.num_seqs, rounds=rounds)
        sampling = step.sampled
        parameters = step.sampling if len(sampling) == step.num_seqs else step.sampling.take(sampling)
        last = step.batch.last_indices()
        arrays = {} if guesses is not None or not sampling else self.sampler.arrays(parameters)
        if guesses is None and 0 < len(sampling) < len(step.batch.tokens):
            # On a GPU a product of another number of rows may be another kernel, to be loaded: sizes are those of the graphs.
            count = len(sampling) if self.graphs is None else padded(len(sampling))
            arrays["last"] = np.pad(last[sampling], (0, count - len(sampling)), mode="edge")
        batch = step.batch if guesses is None else _with_guesses(step, guesses)
        x, on = self._forward(batch, arrays)
        part = _Part(step.num_seqs)
        if step.any_guesses:
            part.results = [SeqResult(num_guessed=n, num_verified=n > 0) for n in step.num_guesses.tolist()]
        self._score_prompts(step, x, part)
        self._pool(step, x, part)
        if not sampling:
            self._guess_on(step, batch, x, part, [], [])
            return part
        if self._masks is not None and parameters.masked.any():
            self._bring(self._masks)
        if guesses is None:
            logits = self.model.head(x[on["last"]] if "last" in on else x)[: len(sampling)]
            part.drawn, part.indices = self.sampler.draw(logits, parameters, on), sampling
            if self.hidden_guesser is not None:
                self._guess_on(step, batch, x, part, [0] * len(sampling), part.drawn.tokens.tolist())
            return part
        # Logits are needed after each sampling sequence's last token and after each of its guesses.
        indices = [np.arange(last[index] - step.num_guesses[index], last[index] + 1) for index in sampling]
        logits = self.model.head(x[torch.from_numpy(np.concatenate(indices)).to(x.device)])
        checked = verify(self.sampler, logits, parameters, [guesses[index] for index in sampling])
        self.sampler.tally(parameters, [chosen[-1].token for chosen in checked])
        for index, chosen in zip(sampling, checked):
            part.known()[index].chosen, part.known()[index].num_kept = chosen, len(chosen) - 1
        self._guess_on(step, batch, x, part, [len(one) - 1 for one in checked], [one[-1].token for one in checked])
        return part

    def _guess_on(
        self, step: StepInput, batch: ForwardBatch, x: Tensor, part: _Part, kept: list[int], last: list[int]
    ) -> None:
        """Lets a drafter that reads hidden states guess for the next step, in which they are verified."""
        if self.hidden_guesser is None:
            return
        passed = Passed(step, batch, x, self._tapped, step.sampled, kept, last)
        if self.rounds is not None and self.rounds.guesses_on and self.rounds.takes(step):
            self.hidden_guesser.read_on(passed)  # the next step guesses in a round
            return
        for index, tokens in zip(step.sampled, self.hidden_guesser.guess_on(passed)):
            part.known()[index].guesses = tokens

    def _replayed(self, step: StepInput) -> SamplerOutput | None:
        """The choices of a step that one graph runs to its end: one token of each sequence, no list of tokens to regard."""
        batch, sampling = step.batch, step.sampling
        if self.graphs is None or not self._whole or self.guesser is not None or self.hidden_guesser is not None:
            return None
        if not len(batch.tokens) == batch.num_seqs == len(step.sampled) or step.scored or step.pooling.any():
            return None
        if sampling.any_touched or sampling.any_logprobs:
            return None
        key = self.graphs.choose(batch, "filtered" if sampling.any_filters else "plain")
        if key is None or not key.draws:
            return None
        self._bring_table(batch)
        tokens = self.graphs.drawn(key, batch, sampling)
        return SamplerOutput.of(tokens, tokens)

    def _in_rounds(self, step: StepInput, guesses: list[Guess] | None) -> RoundsOutput | None:
        """The step as rounds of verifying and guessing, where all its sequences may run so."""
        drawn = any(one.probs is not None for one in guesses or ())
        count = 0 if self.rounds is None or not self._whole or drawn else self.rounds.count(step)
        if self.rounds is None or not count:
            return None
        self._bring_table(step.batch)
        return self.rounds.launch(step, step.batch if guesses is None else _with_guesses(step, guesses), count)

    def _bring_table(self, batch: ForwardBatch) -> None:
        assert self._table is not None, "graphs have a table"
        changes = self._table.changes(batch.table)
        if changes:
            self._table.bring(self._placer.place(changes))

    def _bring(self, masks: Masks) -> None:
        """Places the masks of the step's sequences, once."""
        if self.sampler.masks is None:
            self.sampler.masks = self._placer.place({"masks": masks()})["masks"]

    def _guesses(self, step: StepInput) -> list[Guess] | None:
        """Each sequence's guesses; None when no sequence has any. The draft model computes its tokens in any case."""
        guesses = self.guesser.guess(step) if self.guesser is not None and len(step.draft_tokens) else None
        if not step.any_guesses:
            return None
        if guesses is None:
            ends = step.batch.last_indices() + 1
            tokens = step.batch.tokens
            guesses = [Guess(tokens[end - count : end].tolist()) for end, count in zip(ends, step.num_guesses)]
        return guesses

    def _forward(self, batch: ForwardBatch, more: Mapping[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden states [T, D] of the batch's tokens, and the arrays `more` on the device."""
        graphs = self.graphs
        key = None if graphs is None else graphs.choose(batch)
        arrays = dict(batch.arrays()) if key is None else {}
        if self._table is not None:
            arrays.pop("table", None)
            if key is None and batch.lengths.max() > 1:  # one number for all such steps: kernels are compiled once
                arrays |= {name: _longer(arrays[name], len(self._table.tensor)) for name in ("lengths", "ends")}
            arrays |= self._table.changes(batch.table)
        on = self._placer.place({**arrays, **more})
        if self._table is not None:
            self._table.bring(on)
            if key is None:
                on["table"] = self._table.tensor[: len(on["ends"])]
        if graphs is not None and key is not None:
            x = graphs.hidden(key, batch)
            self._tapped = graphs.tapped(key, batch)
            return x, on
        if (batch.sources >= 0).any():
            on["tokens"] = known_tokens(on["tokens"], on["sources"], self._last)
        context = Paged(self.cache, batch, self.device, on)
        self._tapped = context.taps = dict.fromkeys(self._taps)
        if self.adapters is None or not batch.any_adapters:
            return self.model.hidden(context.tokens, context), on
        with self.adapters.slots.of(on["adapter_slots"]):
            return self.adapters.model.hidden(context.tokens, context), on

    def _score_prompts(self, step: StepInput, x: Tensor, part: _Part) -> None:
        """Log-probabilities of the prompt tokens that follow the ones just computed, where they are asked for."""
        if not step.scored:
            return
        begins = step.batch.last_indices() + 1 - step.batch.lengths
        counts = step.batch.lengths - step.num_guesses  # guesses may follow the prompt's last token
        for index in step.scored:
            begin, count = int(begins[index]), int(step.score_counts[index])
            own = step.batch.tokens[begin : begin + int(counts[index])].tolist()
            targets = own[1:] + [token for token in (int(step.next_tokens[index]),) if token >= 0]
            for start in range(0, len(targets), _SCORED):
                some = targets[start : start + _SCORED]
                logits = self.model.head(x[begin + start : begin + start + len(some)]).float()
                placed = self._placer.place({"targets": np.array(some)})["targets"]
                scores = TokenLogprobs.of(logits, placed, [count] * len(some))
                part.scores.append((index, scores, some))

    def _pool(self, step: StepInput, x: Tensor, part: _Part) -> None:
        """The sum of the normed hidden states of a sequence's tokens, or the last one, where it is asked for."""
        part.pooled = np.flatnonzero(step.pooling).tolist()
        if not part.pooled:
            return
        ends = step.batch.last_indices() + 1 - step.num_guesses
        counts = step.batch.lengths - step.num_guesses
        rows = []
        for index in part.pooled:
            end, kind = int(ends[index]), int(step.pooling[index])
            own = x[end - int(counts[index]) : end] if kind == 1 else x[end - 1 : end]
            rows.append(self.model.norm(own).float().sum(0))
        part.states = torch.stack(rows)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    """`array` and zeros up to `length`."""
    return np.concatenate((array, np.zeros(length - len(array), dtype=array.dtype)))


def _with_guesses(step: StepInput, guesses: Sequence[Guess]) -> ForwardBatch:
    """The step's tokens with the guesses at their places."""
    tokens = step.batch.tokens.copy()
    for end, guess in zip(step.batch.last_indices() + 1, guesses):
        tokens[end - len(guess.tokens) : end] = guess.tokens
    return replace(step.batch, tokens=tokens)
