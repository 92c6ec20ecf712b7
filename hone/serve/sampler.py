"""From logits to tokens: penalties, filters, and draws that depend on (seed, position, token) alone, never on the batch.

A draw is Gumbel-max: argmax of logits + noise, with the noise of each (seed, position, token) a hash of the three
(as in vLLM's second model runner). So a seeded request gives the same text in any company, before or after a
preemption, and no softmax is needed.

Legend: E entries (one per token to choose), V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.ops.sample.api import (
    ACCEPT,
    GUMBEL,
    RESIDUAL,
    filter_logits,
    gumbel,
    noise_keys,
    sample,
    token_hashes,
    uniform,
)
from hone.serve.request import SamplingParams, TokenLogprob

__all__ = ["ACCEPT", "GUMBEL", "RESIDUAL", "Chooser", "Chosen", "Entry", "Sampler", "logprobs", "uniform"]

_LOGPROB_ROWS = 256
"""Rows of float32 log-probabilities made at a time: what scoring a long prompt may need beside the model."""


@dataclass
class Chooser:
    """What the sampler knows about one request: its parameters, seed, and the tokens it may not end with yet."""

    params: SamplingParams
    ends: tuple[int, ...] = ()  # end-of-text and stop tokens, banned below min_tokens
    seed: int = field(init=False)  # the request's, or a random one
    plain: bool = field(init=False)  # the most likely token of untouched logits
    penalized: bool = field(init=False)  # logits depend on the tokens before

    def __post_init__(self) -> None:
        params = self.params
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.penalized = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        banning = params.min_tokens > 0 and bool(self.ends)
        self.plain = params.greedy and not self.penalized and not params.logit_bias and not banning


@dataclass
class Entry:
    """One token to choose: by whom, after which tokens, of which `num_prompt` are the prompt, and `ahead` guesses more."""

    chooser: Chooser
    tokens: Sequence[int]
    num_prompt: int
    ahead: int = 0

    @property
    def position(self) -> int:
        """Place of the token to choose in its sequence."""
        return len(self.tokens) + self.ahead


@dataclass
class Chosen:
    """The token chosen for an entry; `finite` is False when its logits were not numbers (the token is then void)."""

    token: int
    finite: bool
    logprob: TokenLogprob | None = None


class Sampler:
    """Chooses tokens from logits [E, V] on one device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._token_hashes: Tensor | None = None

    def choose(self, logits: Tensor, entries: Sequence[Entry]) -> list[Chosen]:
        """One choice per entry. `logits` [E, V] in any floating dtype."""
        if all(entry.chooser.plain and entry.chooser.params.logprobs is None for entry in entries):
            best = logits.max(-1)
            return [
                Chosen(token, math.isfinite(value)) for token, value in zip(best.indices.tolist(), best.values.tolist())
            ]
        raw = logits.float()
        peaks = raw.max(-1).values.tolist()
        tokens = self.draw(self.process(raw, entries), entries).tolist()
        choices = [Chosen(token, math.isfinite(peak)) for token, peak in zip(tokens, peaks)]
        asking = [place for place, entry in enumerate(entries) if entry.chooser.params.logprobs is not None]
        for place, logprob in zip(asking, self._logprobs_of(raw, entries, tokens, asking)):
            choices[place].logprob = logprob
        return choices

    def _logprobs_of(
        self, raw: Tensor, entries: Sequence[Entry], tokens: list[int], asking: list[int]
    ) -> list[TokenLogprob]:
        if not asking:
            return []
        counts = [entries[place].chooser.params.logprobs or 0 for place in asking]
        rows = raw if len(asking) == len(entries) else raw[asking]
        return logprobs(rows, [tokens[place] for place in asking], counts)

    def process(self, raw: Tensor, entries: Sequence[Entry]) -> Tensor:
        """Logits [E, V] float32 with penalties, biases and bans applied; `raw` itself when no entry has any."""
        out = raw
        for place, entry in enumerate(entries):
            chooser = entry.chooser
            params = chooser.params
            banned = chooser.ends and entry.position - entry.num_prompt < params.min_tokens
            if not (chooser.penalized or params.logit_bias or banned):
                continue
            if out is raw:
                out = raw.clone()
            row = out[place]
            if chooser.penalized:
                self._penalize(row, entry)
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=row.device)
                row.index_add_(0, ids, torch.tensor(list(params.logit_bias.values()), device=row.device))
            if banned:
                row[list(chooser.ends)] = -math.inf
        return out

    def _penalize(self, row: Tensor, entry: Entry) -> None:
        params = entry.chooser.params
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(entry.tokens)), device=row.device)
            values = row[seen]
            penalty = params.repetition_penalty
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        output = entry.tokens[entry.num_prompt :]
        if output and (params.presence_penalty or params.frequency_penalty):
            ids, counts = torch.tensor(output, device=row.device).unique(return_counts=True)
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty

    def draw(self, logits: Tensor, entries: Sequence[Entry]) -> Tensor:
        """Tokens int64 [E] from processed logits [E, V]: argmax where the temperature is 0, Gumbel-max elsewhere."""
        if logits.is_cuda and any(not entry.chooser.params.greedy for entry in entries):
            return self._draw_at_once(logits, entries)
        drawing = [place for place, entry in enumerate(entries) if not entry.chooser.params.greedy]
        if not drawing:
            return logits.argmax(-1)
        chosen = [entries[place] for place in drawing]
        if len(drawing) == len(entries):
            return (self.filter(logits, chosen) + self.noise(chosen)).argmax(-1)
        tokens = logits.argmax(-1)
        tokens[drawing] = (self.filter(logits[drawing], chosen) + self.noise(chosen)).argmax(-1)
        return tokens

    def filter(self, logits: Tensor, entries: Sequence[Entry]) -> Tensor:
        """Logits / temperature, -inf where min-p, top-k or top-p drop the token. None of `entries` is greedy."""
        params = [entry.chooser.params for entry in entries]
        return filter_logits(
            logits,
            [one.temperature for one in params],
            [one.min_p for one in params],
            [one.top_k or 0 for one in params],
            [one.top_p for one in params],
        )

    def _draw_at_once(self, logits: Tensor, entries: Sequence[Entry]) -> Tensor:
        """`draw` in a few kernels: thresholds without a sort, noise made where it is added."""
        params = [entry.chooser.params for entry in entries]
        drawn = [one for one in params if not one.greedy]
        return sample(
            logits,
            [0.0 if one.greedy else one.temperature for one in params],
            [one.top_k or 0 for one in params] if any(one.top_k for one in drawn) else None,
            [one.top_p for one in params] if any(one.top_p < 1 for one in drawn) else None,
            [one.min_p for one in params] if any(one.min_p > 0 for one in drawn) else None,
            keys=self._keys(entries),
        )

    def noise(self, entries: Sequence[Entry], streams: Sequence[int] | None = None) -> Tensor:
        """Gumbel noise float64 [E, V]: the same for the same (seed, position, token, stream), whatever the batch.

        `streams` names each entry's stream, GUMBEL when None.
        """
        if self._token_hashes is None:
            self._token_hashes = token_hashes(torch.arange(self.vocab_size, device=self.device))
        return gumbel(self._keys(entries, streams), self._token_hashes)

    def _keys(self, entries: Sequence[Entry], streams: Sequence[int] | None = None) -> Tensor:
        seeds, positions = [one.chooser.seed for one in entries], [one.position for one in entries]
        return noise_keys(seeds, positions, streams or GUMBEL, self.device)


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability of tokens[i] under logits[i] (float32 [N, V]) and of the counts[i] most likely tokens.

    A token that is the most likely one has exactly the first alternative's number. When alternatives are asked for and
    the token is not among them, it stands after them.
    """
    found = []
    for start in range(0, len(tokens), _LOGPROB_ROWS):
        part = slice(start, start + _LOGPROB_ROWS)
        rows = logits[part].float()
        normalizer = rows.logsumexp(-1, keepdim=True)
        index = torch.tensor(tokens[part], device=rows.device)[:, None]
        own = (rows.gather(-1, index) - normalizer).squeeze(-1).tolist()
        widest = min(max(counts[part]), rows.shape[-1])
        best = rows.topk(widest) if widest else None
        values = (best.values - normalizer).tolist() if best else [[]] * len(own)
        places = best.indices.tolist() if best else [[]] * len(own)
        for token, logprob, count, lps, ids in zip(tokens[part], own, counts[part], values, places):
            top = list(zip(ids[:count], lps[:count]))
            if count and token not in ids[:count]:
                top.append((token, logprob))
            found.append(TokenLogprob(token, logprob, top))
    return found
