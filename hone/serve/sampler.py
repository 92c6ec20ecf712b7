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

from hone.serve.request import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
_LOGPROB_ROWS = 256
"""Rows of float32 log-probabilities made at a time: what scoring a long prompt may need beside the model."""

GUMBEL, ACCEPT, RESIDUAL = 0, 1, 2
"""Streams of noise of one (seed, position): the draw itself, and the two that speculation needs."""


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
        if any(one.temperature != 1 for one in params):
            logits = logits / self._column([one.temperature for one in params])
        if any(one.min_p > 0 for one in params):
            floor = self._column([math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params])
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor, -math.inf)
        vocab_size = logits.shape[-1]
        counts = [min(one.top_k or vocab_size, vocab_size) for one in params]
        if any(one.top_p < 1 for one in params):
            ordered = logits.sort(-1, descending=True).values
            places = torch.arange(vocab_size, device=logits.device)
            ordered = ordered.masked_fill(places >= self._column(counts), -math.inf)
            mass = ordered.softmax(-1)
            # A row without top-p must not lose its rarest tokens to rounding because a row beside it has one.
            bounds = [one.top_p if one.top_p < 1 else 2.0 for one in params]
            kept = mass.cumsum(-1) - mass < self._column(bounds)
            last = (kept & (ordered > -math.inf)).sum(-1, keepdim=True).clamp(min=1) - 1
            logits = logits.masked_fill(logits < ordered.gather(-1, last), -math.inf)
        elif min(counts) < vocab_size:
            best = logits.topk(max(count for count in counts if count < vocab_size)).values
            places = torch.tensor([min(count, best.shape[-1]) - 1 for count in counts], device=logits.device)
            floor = best.gather(-1, places[:, None])
            floor = floor.masked_fill(self._column(counts) >= vocab_size, -math.inf)
            logits = logits.masked_fill(logits < floor, -math.inf)
        return logits

    def noise(self, entries: Sequence[Entry], streams: Sequence[int] | None = None) -> Tensor:
        """Gumbel noise float64 [E, V]: the same for the same (seed, position, token, stream), whatever the batch.

        `streams` names each entry's stream, GUMBEL when None.
        """
        if self._token_hashes is None:
            hashes = [_signed(_mix(token)) for token in range(self.vocab_size)]
            self._token_hashes = torch.tensor(hashes, dtype=torch.int64, device=self.device)
        streams = streams or [GUMBEL] * len(entries)
        keys = [_signed(_key(one.chooser.seed, one.position, stream)) for one, stream in zip(entries, streams)]
        x = self._token_hashes ^ torch.tensor(keys, dtype=torch.int64, device=self.device)[:, None]
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):  # MurmurHash3's 64-bit finalizer
            x ^= (x >> 33) & 0x7FFFFFFF
            x *= _signed(multiplier)
        x ^= (x >> 33) & 0x7FFFFFFF
        uniform = ((x >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
        return uniform.log_().neg_().log_().neg_()

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self.device)[:, None]


def uniform(seed: int, position: int, stream: int) -> float:
    """A number in (0, 1) that depends on its arguments alone."""
    return ((_mix(_key(seed, position, stream)) >> 11) + 0.5) * 2.0**-53


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


def _mix(value: int) -> int:
    """SplitMix64 of one number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    return _mix(_mix(_mix(seed & _MASK) ^ position) ^ stream)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
