"""From logits to tokens: penalties, filters, and draws that depend on (seed, position, token) alone, never on the batch.

A draw is Gumbel-max: argmax of logits + noise, with the noise of each (seed, position, token) a hash of the three
(as in vLLM's second model runner). So a seeded request gives the same text in any batch, before or after a
preemption, and no softmax is needed.

Legend: E entries (one per token to draw), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.ops import sample
from hone.ops.sample.noise import ACCEPT, GUMBEL, RESIDUAL, gumbel, noise_keys, token_hashes, uniform
from hone.ops.sample.reference import filter_logits
from hone.serve.request import TokenLogprob
from hone.serve.step import Sampling

__all__ = ["ACCEPT", "GUMBEL", "RESIDUAL", "Chosen", "Sampler", "logprobs", "uniform"]

_LOGPROB_TOKENS = 256
"""Tokens whose float32 log-probabilities exist at once: bounds the memory for scoring a long prompt."""


@dataclass
class Chosen:
    """The token chosen for an entry; `finite` is False when its logits had NaN or infinity (the token is then invalid)."""

    token: int
    finite: bool
    logprob: TokenLogprob | None = None


def _chosen(tokens: Tensor, peaks: Tensor) -> list[Chosen]:
    """Tokens [E] and the largest logit [E] of each entry, in one copy to the host: each copy waits for the device."""
    both = torch.stack((tokens.double(), peaks.double())).tolist()  # float64 holds every token id
    return [Chosen(int(token), math.isfinite(peak)) for token, peak in zip(*both)]


class Sampler:
    """Chooses tokens from logits [E, V] on one device, by the arrays of a `Sampling` of E entries."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._token_hashes: Tensor | None = None

    def choose(self, logits: Tensor, sampling: Sampling) -> list[Chosen]:
        """One choice per entry. `logits` [E, V] in any floating dtype."""
        if sampling.plain:
            best = logits.max(-1)
            return _chosen(best.indices, best.values)
        asking = np.flatnonzero(sampling.logprobs >= 0)
        raw = logits.float()
        peaks = raw.max(-1).values
        choices = _chosen(self.draw(self.process(raw, sampling), sampling), peaks)
        tokens = [choice.token for choice in choices]
        if len(asking):
            counts = sampling.logprobs[asking].tolist()
            found = logprobs(
                raw if len(asking) == len(tokens) else raw[asking.tolist()], [tokens[place] for place in asking], counts
            )
            for place, logprob in zip(asking, found):
                choices[place].logprob = logprob
        return choices

    def process(self, raw: Tensor, sampling: Sampling) -> Tensor:
        """Logits [E, V] float32 with penalties, biases and bans applied; `raw` itself when no entry has any."""
        touched = np.flatnonzero(sampling.touched)
        if not len(touched):
            return raw
        out = raw.clone()
        penalized, biased, banning = sampling.penalized, sampling.biased, sampling.banning
        for place in touched:
            logits = out[place]
            spans = sampling.spans[place].tolist()
            if penalized[place]:
                self._penalize(logits, sampling, place)
            if biased[place]:
                span = slice(*spans[2:4])
                values = torch.from_numpy(sampling.bias_values[span].astype(np.float32))
                logits.index_add_(0, _indices(sampling.bias_tokens[span], logits), values.to(logits.device))
            if banning[place]:
                logits[_indices(sampling.banned[slice(*spans[:2])], logits)] = -math.inf
        return out

    @staticmethod
    def _penalize(logits: Tensor, sampling: Sampling, place: int) -> None:
        begin, end, output = sampling.spans[place, 4:].tolist()
        penalty = float(sampling.repetition_penalty[place])
        if penalty != 1:
            seen = _indices(np.unique(sampling.history[begin:end]), logits)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        presence, frequency = float(sampling.presence_penalty[place]), float(sampling.frequency_penalty[place])
        if output < end and (presence or frequency):
            tokens, counts = np.unique(sampling.history[output:end], return_counts=True)
            logits[_indices(tokens, logits)] -= frequency * _indices(counts, logits) + presence

    def draw(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Tokens int64 [E] from processed logits [E, V]: argmax where the temperature is 0, Gumbel-max elsewhere."""
        drawing = np.flatnonzero(~sampling.greedy)
        if not len(drawing):
            return logits.argmax(-1)
        if logits.is_cuda:
            return self._draw_at_once(logits, sampling)
        if len(drawing) == len(sampling):
            return (self.filter(logits, sampling) + self.noise(sampling)).argmax(-1)
        tokens = logits.argmax(-1)
        drawn = sampling.take(drawing)
        tokens[drawing] = (self.filter(logits[drawing], drawn) + self.noise(drawn)).argmax(-1)
        return tokens

    def filter(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Logits / temperature, -inf where min-p, top-k or top-p drop the token. No entry is greedy."""
        return filter_logits(
            logits,
            sampling.temperature.tolist(),
            sampling.min_p.tolist(),
            sampling.top_k.tolist(),
            sampling.top_p.tolist(),
        )

    def _draw_at_once(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """`draw` in a few kernels: thresholds without a sort, noise computed where it is added."""
        drawn = ~sampling.greedy
        return sample(
            logits,
            sampling.temperature.tolist(),
            sampling.top_k.tolist() if (sampling.top_k[drawn] > 0).any() else None,
            sampling.top_p.tolist() if (sampling.top_p[drawn] < 1).any() else None,
            sampling.min_p.tolist() if (sampling.min_p[drawn] > 0).any() else None,
            keys=self._keys(sampling),
        )

    def noise(self, sampling: Sampling, streams: Sequence[int] | None = None) -> Tensor:
        """Gumbel noise float64 [E, V]: equal for equal (seed, position, token, stream), in any batch.

        `streams` names each entry's stream, GUMBEL when None.
        """
        if self._token_hashes is None:
            self._token_hashes = token_hashes(torch.arange(self.vocab_size, device=self.device))
        return gumbel(self._keys(sampling, streams), self._token_hashes)

    def _keys(self, sampling: Sampling, streams: Sequence[int] | None = None) -> Tensor:
        return noise_keys(sampling.seed.tolist(), sampling.position.tolist(), streams or GUMBEL, self.device)


def _indices(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability of tokens[i] under logits[i] (float32 [N, V]) and of the counts[i] most likely tokens.

    The most likely token has exactly the first alternative's value. A token that is not among the requested alternatives
    is appended to them.
    """
    found = []
    for start in range(0, len(tokens), _LOGPROB_TOKENS):
        part = slice(start, start + _LOGPROB_TOKENS)
        some = logits[part].float()
        normalizer = some.logsumexp(-1, keepdim=True)
        index = torch.tensor(tokens[part], device=some.device)[:, None]
        own = (some.gather(-1, index) - normalizer).squeeze(-1).tolist()
        widest = min(max(counts[part]), some.shape[-1])
        best = some.topk(widest) if widest else None
        values = (best.values - normalizer).tolist() if best else [[]] * len(own)
        places = best.indices.tolist() if best else [[]] * len(own)
        for token, logprob, count, lps, ids in zip(tokens[part], own, counts[part], values, places):
            top = list(zip(ids[:count], lps[:count]))
            if count and token not in ids[:count]:
                top.append((token, logprob))
            found.append(TokenLogprob(token, logprob, top))
    return found
