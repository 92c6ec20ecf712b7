"""Speculative decoding: a drafter guesses tokens ahead and one pass of the model verifies them all.

Leviathan et al. 2023, arXiv:2211.17192. A guess d, drawn from q, is accepted with probability min(1, p(d) / q(d)); the first
one rejected is replaced by a draw from max(p - q, 0). So sampled text has the model's distribution and greedy text is
token-identical for any drafter, which changes the speed only.

A drafter has two parts: a `Proposer` beside the scheduler, which takes sequences, and, if it computes, a `Guesser` beside
the model, which takes a `StepInput` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field

from hone.base.figure import Estimate
from hone.base.lazy import lazy
from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.decoder import Decoder
    from hone.serve.paging.cache import KVCache
    from hone.serve.sampler import Chosen, Sampler
    from hone.serve.sequence import ScheduledSeq
    from hone.serve.step import Sampling, StepInput

np = lazy("numpy")
torch = lazy("torch")


@dataclass(frozen=True)
class DraftSetting:
    """The arguments of `Drafter.open`. `draft` is the draft model, given exactly when "draft" is among its `needs`."""

    model: Decoder
    draft: Decoder | None
    sampler: Sampler
    num_pages: int
    block_size: int
    max_num_batched_tokens: int
    cache_dtype: Any
    """Dtype of the draft model's cache; None for that of its weights."""
    device: Any
    max_model_len: int | None = None
    """The longest sequence that the engine serves."""


class Drafter(Technique):
    """Base of the slot: the number of tokens to guess ahead, and the most sequences for which to guess."""

    renamed: ClassVar[dict[str, str | None]] = {"max_rows": "max_num_seqs"}

    num_tokens: int = Field(4, ge=1, le=32, description="Tokens guessed ahead.")
    max_num_seqs: int = Field(
        32, ge=1, description="Guess only while at most this many sequences decode: with more, steps are compute-bound."
    )

    def open(self, setting: DraftSetting) -> tuple[Proposer, Guesser | None]:
        """The two parts for one engine; the `Guesser` is None for a drafter that needs no computation beside the model."""
        raise NotImplementedError

    def estimates(self, *, acceptance: float = 0.7, cost: float = 0.1) -> dict[str, Estimate]:
        """Factor on tokens/s when each guess is accepted with probability `acceptance` and costs `cost` of a model step.

        Theorem 3.8 of the paper: (1 - a^(n + 1)) / ((1 - a) (n c + 1)).
        """
        tokens = self.num_tokens
        kept = tokens + 1.0 if acceptance >= 1 else (1 - acceptance ** (tokens + 1)) / (1 - acceptance)
        return {
            "tokens_per_s": Estimate(
                value=kept / (tokens * cost + 1),
                unit="x",
                formula=f"{kept:.2f} tokens a round / (1 + {tokens} guesses x {cost:.2f})",
            )
        }


@dataclass
class Guess:
    """Tokens guessed after a sequence's last one, drawn from `probs` [len(tokens), V]; None when not drawn."""

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


class Proposer:
    """A drafter's part beside the scheduler. By default it keeps no state and no pages."""

    uses_pages: bool = False
    """Whether its guesser keeps a cache under the sequences' page numbers (with `Seq.drafted` tokens of each)."""

    def propose(self, scheduled: Sequence[ScheduledSeq]) -> None:
        """Sets `num_guesses` (at most `lookahead`) and `guesses`, or the draft model's input instead of the latter."""
        raise NotImplementedError

    def settle(self, item: ScheduledSeq, num_kept: int) -> None:
        """Called after a successful step: the first `num_kept` of the item's guesses were accepted."""


class Guesser(Protocol):
    """A drafter's part beside the model."""

    cache: KVCache
    """Its own cache, under the model's page numbers."""

    def guess(self, step: StepInput) -> list[Guess]:
        """A guess of `num_guesses` tokens for each sequence of the step."""
        ...


def verify(sampler: Sampler, logits: Tensor, sampling: Sampling, guesses: Sequence[Guess]) -> list[list[Chosen]]:
    """Verifies guesses: for each entry of `sampling` the accepted tokens and one more.

    `logits` [sum(len(guess) + 1), V]: for each entry the model's logits after its last token and after each guess.
    """
    from hone.serve.sampler import Chosen, logprobs

    counts = [len(guess.tokens) + 1 for guess in guesses]
    places = _places(counts)
    steps = np.concatenate([np.arange(count) for count in counts])
    ahead = sampling.take(np.repeat(np.arange(len(counts)), counts), steps)
    raw = logits.float()
    processed = sampler.process(raw, ahead)
    peaks, best = raw.amax(-1).tolist(), processed.argmax(-1).tolist()
    greedy = sampling.greedy.tolist()
    tokens = [
        _check_greedy(guess, [best[place] for place in own]) if plain else []
        for plain, guess, own in zip(greedy, guesses, places)
    ]
    drawing = [number for number, plain in enumerate(greedy) if not plain]
    if drawing:
        own = [place for number in drawing for place in places[number]]
        filtered = sampler.filter(processed[own], ahead.take(own))
        drawn = _check_drawn(sampler, filtered, sampling.take(drawing), [guesses[n] for n in drawing])
        for number, found in zip(drawing, drawn):
            tokens[number] = found
    chosen = [
        [Chosen(token, abs(peaks[place]) < float("inf")) for token, place in zip(found, own)]
        for found, own in zip(tokens, places)
    ]
    for asked, found, own in zip(sampling.logprobs.tolist(), chosen, places):
        if asked >= 0:
            some = logprobs(raw[own[: len(found)]], [one.token for one in found], [asked] * len(found))
            for one, logprob in zip(found, some):
                one.logprob = logprob
    return chosen


def _places(counts: Sequence[int]) -> list[list[int]]:
    """The places of each entry's logits, counts[e] for entry e."""
    ends = np.cumsum(counts).tolist()
    return [list(range(end - count, end)) for end, count in zip(ends, counts)]


def _check_greedy(guess: Guess, best: list[int]) -> list[int]:
    """The model's tokens, as long as the guesses before them are equal."""
    kept = 0
    while kept < len(guess.tokens) and guess.tokens[kept] == best[kept]:
        kept += 1
    return best[: kept + 1]


def _check_drawn(sampler: Sampler, filtered: Tensor, sampling: Sampling, guesses: Sequence[Guess]) -> list[list[int]]:
    """Rejection sampling. `filtered` holds log-weights (logits after temperature and filters) in the order of `verify`."""
    from hone.serve.sampler import ACCEPT, GUMBEL, RESIDUAL, uniform

    probs = filtered.softmax(-1)
    places = _places([len(guess.tokens) + 1 for guess in guesses])
    chances = _chances(probs, guesses, places)
    seeds, positions = sampling.seed.tolist(), sampling.position.tolist()
    found, streams, weights = [], [], []
    for seed, position, guess, own, (p, q) in zip(seeds, positions, guesses, places, chances):
        kept = 0
        for mine, theirs in zip(p, q):
            if uniform(seed, position + kept, ACCEPT) * theirs >= mine:
                break
            kept += 1
        refused = kept < len(guess.tokens)
        found.append(guess.tokens[:kept])
        streams.append(RESIDUAL if refused else GUMBEL)
        last = filtered[own[kept]]
        weights.append(_residual(probs[own[kept]], guess, kept, last) if refused else last)
    finals = sampling.take(range(len(found)), np.array([len(tokens) for tokens in found]))
    ends = (torch.stack(weights) + sampler.noise(finals, streams)).argmax(-1).tolist()
    return [[*tokens, end] for tokens, end in zip(found, ends)]


def _chances(
    probs: Tensor, guesses: Sequence[Guess], places: Sequence[list[int]]
) -> list[tuple[list[float], list[float]]]:
    """p and q of every guessed token of each entry, read from the device in one copy."""
    rows = [row for place in places for row in place[:-1]]
    tokens = [token for guess in guesses for token in guess.tokens]
    p = probs[rows, tokens]
    q = torch.ones_like(p)
    begin = 0
    for guess in guesses:
        end = begin + len(guess.tokens)
        if guess.probs is not None and guess.tokens:
            index = torch.tensor(guess.tokens, device=probs.device)[:, None]
            q[begin:end] = guess.probs.gather(-1, index).squeeze(-1)
        begin = end
    flat_p, flat_q = torch.stack((p, q)).tolist()
    chances, begin = [], 0
    for guess in guesses:
        end = begin + len(guess.tokens)
        chances.append((flat_p[begin:end], flat_q[begin:end]))
        begin = end
    return chances


def _residual(p: Tensor, guess: Guess, step: int, weights: Tensor) -> Tensor:
    """log of max(p - q, 0) [V]; the log-weights themselves if rounding makes it 0 everywhere."""
    if guess.probs is None:
        rest = p.clone()
        rest[guess.tokens[step]] = 0
    else:
        rest = (p - guess.probs[step]).clamp_(min=0)
    return torch.where(rest.any(), rest.log(), weights)
