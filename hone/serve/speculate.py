"""Speculative decoding: a drafter guesses tokens ahead, one pass of the model checks them all, the text stays exact.

Leviathan et al. 2023, arXiv:2211.17192. A guess d, drawn from q, is kept with probability min(1, p(d) / q(d)); the first
one refused is replaced by a draw from max(p - q, 0). So sampled text has the model's own distribution and greedy text is
token-identical, whatever the drafter; it only decides the speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field

from hone.base.figure import Estimate
from hone.base.lazy import lazy
from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.decoder import Decoder
    from hone.serve.sampler import Chosen, Entry, Sampler
    from hone.serve.scheduler import Row, Work

torch = lazy("torch")


class Drafter(Technique):
    """Base of the slot: how far ahead to guess, and up to how many rows it pays."""

    num_tokens: int = Field(4, ge=1, le=32, description="Tokens guessed ahead.")
    max_rows: int = Field(
        32, ge=1, description="Guess only while at most this many rows decode: many fill the machine."
    )

    def open(
        self,
        model: Decoder,
        draft: Decoder | None,
        sampler: Sampler,
        num_pages: int,
        page_size: int,
        token_budget: int,
        device: Any,
    ) -> Proposer:
        """What guesses for one engine. `draft` is the draft model, given exactly when "draft" is among `needs`.

        A pass of `draft` may take `token_budget` tokens.
        """
        raise NotImplementedError

    def estimates(self, *, acceptance: float = 0.7, cost: float = 0.1, **facts: Any) -> dict[str, Estimate]:
        """Factor on tokens/s when each guess is kept with probability `acceptance` and costs `cost` of a model step.

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
    """Tokens guessed after a row's last one; `probs` [len(tokens), V] they were drawn from, None when not drawn at all."""

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


class Proposer(Protocol):
    """An opened drafter."""

    cache_bytes: int
    uses_pages: bool
    """Whether it keeps keys of its own under the rows' page numbers (`Row.drafted` then says how many)."""

    def propose(self, work: Sequence[Work]) -> list[Guess]:
        """A guess per item, of at most `lookahead` tokens (none where that is 0)."""
        ...

    def settle(self, row: Row, length: int, num_guessed: int, num_kept: int) -> None:
        """Told after a check: the row had `length` tokens, of the guesses the first `num_kept` were right."""
        ...

    def wipe(self, pages: Sequence[int]) -> None:
        """Told which pages begin a new life."""
        ...


def verify(sampler: Sampler, logits: Tensor, entries: Sequence[Entry], guesses: Sequence[Guess]) -> list[list[Chosen]]:
    """Checks guesses: per entry the kept ones and one more token.

    `logits` [sum(len(guess) + 1), V]: for each entry the model's logits after its last token and after each guess.
    """
    from hone.serve.sampler import Chosen, logprobs

    places = _places(guesses)
    ahead = [replace(entry, ahead=step) for entry, place in zip(entries, places) for step in range(len(place))]
    raw = logits.float()
    processed = sampler.process(raw, ahead)
    peaks, best = raw.amax(-1).tolist(), processed.argmax(-1).tolist()
    tokens = [
        _check_greedy(guess, [best[place] for place in rows]) if entry.chooser.params.greedy else []
        for entry, guess, rows in zip(entries, guesses, places)
    ]
    drawing = [number for number, entry in enumerate(entries) if not entry.chooser.params.greedy]
    if drawing:
        rows = [place for number in drawing for place in places[number]]
        filtered = sampler.filter(processed[rows], [ahead[place] for place in rows])
        drawn = _check_drawn(sampler, filtered, [entries[n] for n in drawing], [guesses[n] for n in drawing])
        for number, found in zip(drawing, drawn):
            tokens[number] = found
    chosen = [
        [Chosen(token, abs(peaks[place]) < float("inf")) for token, place in zip(found, rows)]
        for found, rows in zip(tokens, places)
    ]
    for entry, found, rows in zip(entries, chosen, places):
        asked = entry.chooser.params.logprobs
        if asked is not None:
            some = logprobs(raw[rows[: len(found)]], [one.token for one in found], [asked] * len(found))
            for one, logprob in zip(found, some):
                one.logprob = logprob
    return chosen


def _places(guesses: Sequence[Guess]) -> list[list[int]]:
    """Rows of the logits that belong to each guess."""
    places, begin = [], 0
    for guess in guesses:
        end = begin + len(guess.tokens) + 1
        places.append(list(range(begin, end)))
        begin = end
    return places


def _check_greedy(guess: Guess, best: list[int]) -> list[int]:
    """The model's own tokens, as far as the guesses before them were right."""
    kept = 0
    while kept < len(guess.tokens) and guess.tokens[kept] == best[kept]:
        kept += 1
    return best[: kept + 1]


def _check_drawn(
    sampler: Sampler, filtered: Tensor, entries: Sequence[Entry], guesses: Sequence[Guess]
) -> list[list[int]]:
    """Rejection sampling. `filtered` holds log-weights (logits after temperature and filters) in the order of `verify`."""
    from hone.serve.sampler import ACCEPT, GUMBEL, RESIDUAL, uniform

    probs = filtered.softmax(-1)
    places = _places(guesses)
    chances = _chances(probs, guesses, places)
    found, finals, streams, weights = [], [], [], []
    for entry, guess, rows, (p, q) in zip(entries, guesses, places, chances):
        kept = 0
        for mine, theirs in zip(p, q):
            if uniform(entry.chooser.seed, entry.position + kept, ACCEPT) * theirs >= mine:
                break
            kept += 1
        refused = kept < len(guess.tokens)
        found.append(guess.tokens[:kept])
        finals.append(replace(entry, ahead=kept))
        streams.append(RESIDUAL if refused else GUMBEL)
        own = filtered[rows[kept]]
        weights.append(_residual(probs[rows[kept]], guess, kept, own) if refused else own)
    ends = (torch.stack(weights) + sampler.noise(finals, streams)).argmax(-1).tolist()
    return [[*tokens, end] for tokens, end in zip(found, ends)]


def _chances(
    probs: Tensor, guesses: Sequence[Guess], places: Sequence[list[int]]
) -> list[tuple[list[float], list[float]]]:
    """p and q of every guessed token, per row, read from the device in one go."""
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
    """log of max(p - q, 0) [V]; the plain log-weights when rounding leaves nothing of it."""
    if guess.probs is None:
        rest = p.clone()
        rest[guess.tokens[step]] = 0
    else:
        rest = (p - guess.probs[step]).clamp_(min=0)
    return torch.where(rest.any(), rest.log(), weights)
