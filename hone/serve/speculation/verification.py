"""Verifies guessed tokens with one pass of the model, exactly: what a drafter guesses changes the speed only.

Leviathan et al. 2023, arXiv:2211.17192. A guess d, drawn from q, is accepted with probability min(1, p(d) / q(d)); the first
one rejected is replaced by a draw from max(p - q, 0). A guess of no distribution is accepted where it is what the model's own draw
gives, which has the same chance, p(d), and leaves the text as it is without guesses. So sampled text has the model's distribution,
and greedy text is token-identical.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hone.serve.sampler import ACCEPT, GUMBEL, RESIDUAL, SampledToken, Sampler, logprobs, uniform
from hone.serve.speculation.drafter import Guess
from hone.serve.step import SamplingMetadata


def verify(
    sampler: Sampler, logits: Tensor, sampling: SamplingMetadata, guesses: Sequence[Guess]
) -> list[list[SampledToken]]:
    """Verifies guesses: for each entry of `sampling` the accepted tokens and one more.

    `logits` [sum(len(guess) + 1), V]: for each entry the model's logits after its last token and after each guess.
    """
    counts = [len(guess.tokens) + 1 for guess in guesses]
    places = _places(counts)
    steps = np.concatenate([np.arange(count) for count in counts])
    ahead = sampling.take(np.repeat(np.arange(len(counts)), counts), steps)
    raw = logits.float()
    processed = sampler.process(raw, ahead)
    peaks, best = raw.amax(-1).tolist(), processed.argmax(-1).tolist()
    greedy = sampling.greedy.tolist()
    drawn_from = [guess.probs is not None for guess in guesses]
    alike = [place for own, plain, q in zip(places, greedy, drawn_from) if not (plain or q) for place in own]
    if alike:
        some = ahead.take(alike)
        ends = (sampler.filter(processed[alike], some) + sampler.noise(some)).argmax(-1).tolist()
        for place, token in zip(alike, ends):
            best[place] = token
    tokens = [_check_alike(guess, [best[place] for place in own]) for guess, own in zip(guesses, places)]
    drawing = [number for number, q in enumerate(drawn_from) if q and not greedy[number]]
    if drawing:
        own = [place for number in drawing for place in places[number]]
        filtered = sampler.filter(processed[own], ahead.take(own))
        drawn = _check_drawn(sampler, filtered, sampling.take(drawing), [guesses[n] for n in drawing])
        for number, found in zip(drawing, drawn):
            tokens[number] = found
    chosen = [
        [SampledToken(token, abs(peaks[place]) < float("inf")) for token, place in zip(found, own)]
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


def _check_alike(guess: Guess, best: list[int]) -> list[int]:
    """The model's tokens, as long as the guesses before them are equal."""
    kept = 0
    while kept < len(guess.tokens) and guess.tokens[kept] == best[kept]:
        kept += 1
    return best[: kept + 1]


def _check_drawn(
    sampler: Sampler, filtered: Tensor, sampling: SamplingMetadata, guesses: Sequence[Guess]
) -> list[list[int]]:
    """Rejection sampling of drawn guesses. `filtered` holds log-weights (logits after temperature and filters) in the order of `verify`."""
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
    drawn_from = torch.cat([guess.probs for guess in guesses if guess.probs is not None])
    q = drawn_from.gather(-1, torch.tensor(tokens, device=probs.device)[:, None]).squeeze(-1)
    flat_p, flat_q = torch.stack((p, q)).tolist()
    chances, begin = [], 0
    for guess in guesses:
        end = begin + len(guess.tokens)
        chances.append((flat_p[begin:end], flat_q[begin:end]))
        begin = end
    return chances


def _residual(p: Tensor, guess: Guess, step: int, weights: Tensor) -> Tensor:
    """log of max(p - q, 0) [V]; the log-weights themselves if rounding makes it 0 everywhere."""
    assert guess.probs is not None, "it was drawn"
    rest = (p - guess.probs[step]).clamp_(min=0)
    return torch.where(rest.any(), rest.log(), weights)
