"""Verifies guessed tokens with one pass of the model, exactly: what a drafter guesses changes the speed only.

Leviathan et al. 2023, arXiv:2211.17192. A guess d, drawn from q, is accepted with probability min(1, p(d) / q(d)); the first
one rejected is replaced by a draw from max(p - q, 0). So sampled text has the model's distribution, and greedy text is
token-identical.
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


def _check_greedy(guess: Guess, best: list[int]) -> list[int]:
    """The model's tokens, as long as the guesses before them are equal."""
    kept = 0
    while kept < len(guess.tokens) and guess.tokens[kept] == best[kept]:
        kept += 1
    return best[: kept + 1]


def _check_drawn(
    sampler: Sampler, filtered: Tensor, sampling: SamplingMetadata, guesses: Sequence[Guess]
) -> list[list[int]]:
    """Rejection sampling. `filtered` holds log-weights (logits after temperature and filters) in the order of `verify`."""
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
