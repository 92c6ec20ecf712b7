"""From logits to tokens: penalties, filters, and draws that depend on (seed, position, token) alone, never on the batch.

A draw is Gumbel-max: argmax of logits + noise, with the noise of each (seed, position, token) a hash of the three
(as in vLLM's second model runner). So a seeded request gives the same text in any batch, before or after a
preemption, and no softmax is needed. On a GPU nothing here waits for the device until `SamplerOutput.read`.

Legend: E entries (one per token to draw), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.ops import apply_token_bitmask, count_tokens, penalize, sample, token_logprobs
from hone.ops.sample.logprobs import MOST_TOP
from hone.ops.sample.noise import ACCEPT, GUMBEL, RESIDUAL, gumbel, noise_keys, token_hashes, uniform
from hone.ops.sample.reference import filter_logits
from hone.serve.device.placing import Placer
from hone.serve.request import TokenLogprob
from hone.serve.step import SamplingMetadata

__all__ = ["ACCEPT", "GUMBEL", "RESIDUAL", "SampledToken", "Sampler", "SamplerOutput", "logprobs", "uniform"]

_LOGPROB_TOKENS = 256
"""Tokens whose float32 log-probabilities exist at once: bounds the memory for scoring a long prompt."""


@dataclass
class SampledToken:
    """The token chosen for an entry; `finite` is False when its logits had NaN or infinity (the token is then invalid)."""

    token: int
    finite: bool
    logprob: TokenLogprob | None = None


@dataclass
class SamplerOutput:
    """Choices on their way to the host. `tokens` int64 [E] are on the device: the next step may read them there."""

    tokens: Tensor
    _told: Tensor  # int64 [E], on the host after the event: the tokens, -1 where logits are not finite
    _event: torch.cuda.Event | None
    _scores: TokenLogprobs | None = None
    _asking: Sequence[int] = ()

    @classmethod
    def of(
        cls, tokens: Tensor, told: Tensor, scores: TokenLogprobs | None = None, asking: Sequence[int] = ()
    ) -> SamplerOutput:
        """Starts the copy to the host of `told` and `scores`."""
        if not told.is_cuda:
            return cls(tokens, told, None, scores, asking)
        told = told.to("cpu", non_blocking=True)
        scores = None if scores is None else scores.to_host()
        event = torch.cuda.Event()
        event.record()
        return cls(tokens, told, event, scores, asking)

    @property
    def plain(self) -> bool:
        """Whether the tokens are all that there is: no log-probabilities."""
        return self._scores is None

    def told(self) -> list[int]:
        """The tokens, -1 where logits are not finite, once the device has chosen them."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._told.tolist()
        return tokens

    def read(self) -> list[SampledToken]:
        """The choices, once the device has made them."""
        choices = [SampledToken(token, token >= 0) for token in self.told()]
        if self._scores is not None:
            for place, logprob in zip(self._asking, self._scores.read([choices[p].token for p in self._asking])):
                choices[place].logprob = logprob
        return choices


class Sampler:
    """Chooses tokens from logits [E, V] on one device, by the arrays of a `SamplingMetadata` of E entries.

    Penalties need the tokens before: a table of counts, int32 [slots, V], that grows with the slots in use. The top bit
    marks a token of the prompt, the others count how often it was generated.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._token_hashes: Tensor | None = None
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._lowest = torch.tensor(-math.inf, device=device)
        self._placer = Placer(device)
        self.masks: Tensor | None = None
        """int32 [M, ceil(V / 32)] on the device: those of the step under way (`SamplingMetadata.mask_row`)."""

    @torch.inference_mode()
    def choose(self, logits: Tensor, sampling: SamplingMetadata) -> list[SampledToken]:
        """One choice per entry. `logits` [E, V] in any floating dtype."""
        self.seat(sampling)
        return self.draw(logits, sampling).read()

    @torch.inference_mode()
    def draw(self, logits: Tensor, sampling: SamplingMetadata, on: Mapping[str, Tensor] | None = None) -> SamplerOutput:
        """As `choose`, without waiting for the device; slots are seated already. `on`: `arrays` of `sampling`, placed."""
        if sampling.plain:
            best = logits.max(-1)
            return _drawn(best.indices, best.values)
        on = self._placer.place(self.arrays(sampling)) if on is None else on
        if logits.is_cuda and not sampling.any_touched and not sampling.any_logprobs:
            tokens, peaks = self._drawn_at_once(logits, sampling, on)  # reads the logits once, in their dtype
            return _drawn(tokens, peaks)
        raw = logits.float()
        peaks = raw.amax(-1)
        tokens = self._tokens(self.process(raw, sampling, on), sampling, on)
        scores, asking = None, np.flatnonzero(sampling.logprobs >= 0).tolist()
        if asking:
            rows = on["asking"]
            scores = TokenLogprobs.of(raw[rows], tokens[rows], sampling.logprobs[asking].tolist())
        self.count(tokens, sampling, on)  # last: what fails before is run again
        return _drawn(tokens, peaks, scores, asking)

    @staticmethod
    def arrays(sampling: SamplingMetadata) -> dict[str, np.ndarray]:
        """What the device needs of `sampling`, to be placed there: nothing for plain ones."""
        if sampling.plain:
            return {}
        arrays = {
            "seeds": sampling.seed.astype(np.int64),
            "drawn_positions": sampling.position.astype(np.int64),
            "temperature": sampling.temperature.astype(np.float32),
            "top_k": np.minimum(sampling.top_k, 2**31 - 1).astype(np.int32),
            "top_p": sampling.top_p.astype(np.float32),
            "min_p": sampling.min_p.astype(np.float32),
        }
        asking = np.flatnonzero(sampling.logprobs >= 0)
        if len(asking):
            arrays["asking"] = asking
        if not sampling.any_touched:
            return arrays
        penalized = np.flatnonzero(sampling.penalized)
        if len(penalized):
            factors = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
            arrays["penalized"], arrays["slot"] = penalized, sampling.slot
            arrays["penalties"] = np.stack(factors).astype(np.float32)
        biased, banning = np.flatnonzero(sampling.biased), np.flatnonzero(sampling.banning)
        if sampling.masked.any():
            arrays["mask_row"] = sampling.mask_row
        if len(biased):
            places, at = _flat(biased, sampling.spans[biased, 2:4])
            arrays["biased"] = np.stack((places, sampling.bias_tokens[at]))
            arrays["bias"] = sampling.bias_values[at].astype(np.float32)
        if len(banning):
            places, at = _flat(banning, sampling.spans[banning, 0:2])
            arrays["banned"] = np.stack((places, sampling.banned[at]))
        return arrays

    def process(self, raw: Tensor, sampling: SamplingMetadata, on: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits [E, V] float32 with penalties, biases and bans applied; `raw` itself when no entry has any."""
        if not sampling.any_touched:
            return raw
        on = self._placer.place(self.arrays(sampling)) if on is None else on
        if "slot" in on and raw.is_cuda:  # one kernel for all entries
            out = penalize(raw, self._counts, on["slot"], *on["penalties"])
        else:
            out = raw.clone()
            if "slot" in on:
                rows = on["penalized"]
                out[rows] = penalize(raw[rows], self._counts, on["slot"][rows], *on["penalties"][:, rows])
        if "biased" in on:
            out.index_put_(tuple(on["biased"]), on["bias"], accumulate=True)
        if "banned" in on:
            out.index_put_(tuple(on["banned"]), self._lowest)
        if "mask_row" in on and self.masks is not None:
            apply_token_bitmask(out, self.masks, on["mask_row"])
        return out

    @torch.inference_mode()
    def seat(self, sampling: SamplingMetadata) -> None:
        """Counts the `history` of the entries whose slots are new to them."""
        fresh = np.flatnonzero(sampling.spans[:, 5] > sampling.spans[:, 4])
        if not len(fresh):
            return
        self._grow(int(sampling.slot.max()) + 1)
        slots, at = _flat(sampling.slot[fresh], sampling.spans[fresh, 4:6])
        asked = at < np.repeat(sampling.spans[fresh, 6], np.diff(sampling.spans[fresh, 4:6])[:, 0])
        arrays = {"fresh": sampling.slot[fresh], "tokens": sampling.history[at]}
        arrays |= {"prompt": np.where(asked, slots, -1), "output": np.where(asked, -1, slots)}
        on = self._placer.place(arrays)
        self._counts.index_fill_(0, on["fresh"], 0)
        count_tokens(self._counts, on["prompt"], on["tokens"], prompt=True)
        count_tokens(self._counts, on["output"], on["tokens"])

    def count(self, tokens: Tensor, sampling: SamplingMetadata, on: Mapping[str, Tensor]) -> None:
        """Counts the tokens [E] that penalized entries got."""
        if "slot" in on:
            count_tokens(self._counts, on["slot"], tokens)

    @torch.inference_mode()
    def tally(self, sampling: SamplingMetadata, tokens: Sequence[int]) -> None:
        """`count` of tokens that are on the host; an entry with penalties has one."""
        if sampling.penalized.any():
            on = self._placer.place({**self.arrays(sampling), "tokens": np.array(tokens, dtype=np.int64)})
            self.count(on["tokens"], sampling, on)

    def _grow(self, slots: int) -> None:
        if slots > len(self._counts):
            grown = self._counts.new_zeros(1 << (slots - 1).bit_length(), self.vocab_size)
            grown[: len(self._counts)] = self._counts
            self._counts = grown

    def _tokens(self, logits: Tensor, sampling: SamplingMetadata, on: Mapping[str, Tensor]) -> Tensor:
        """Tokens int64 [E] from processed logits [E, V]: argmax where the temperature is 0, Gumbel-max elsewhere."""
        drawing = np.flatnonzero(~sampling.greedy)
        if not len(drawing):
            return logits.argmax(-1)
        if logits.is_cuda:
            return self._drawn_at_once(logits, sampling, on)[0]
        if len(drawing) == len(sampling):
            return (self.filter(logits, sampling) + self.noise(sampling)).argmax(-1)
        tokens = logits.argmax(-1)
        drawn = sampling.take(drawing)
        tokens[drawing] = (self.filter(logits[drawing], drawn) + self.noise(drawn)).argmax(-1)
        return tokens

    @staticmethod
    def _drawn_at_once(logits: Tensor, sampling: SamplingMetadata, on: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(tokens, largest logits) in two kernels: thresholds without a sort, noise computed where it is added."""
        drawing = ~sampling.greedy
        drawn: tuple[Tensor, Tensor] = sample(
            logits,
            on["temperature"],
            on["top_k"] if (sampling.top_k[drawing] > 0).any() else None,
            on["top_p"] if (sampling.top_p[drawing] < 1).any() else None,
            on["min_p"] if (sampling.min_p[drawing] > 0).any() else None,
            keys=(on["seeds"], on["drawn_positions"]),
            peaks=True,
        )
        return drawn

    def filter(self, logits: Tensor, sampling: SamplingMetadata) -> Tensor:
        """Logits / temperature, -inf where min-p, top-k or top-p drop the token. No entry is greedy."""
        return filter_logits(
            logits,
            sampling.temperature.tolist(),
            sampling.min_p.tolist(),
            sampling.top_k.tolist(),
            sampling.top_p.tolist(),
        )

    def noise(self, sampling: SamplingMetadata, streams: Sequence[int] | None = None) -> Tensor:
        """Gumbel noise float32 [E, V]: equal for equal (seed, position, token, stream), in any batch.

        `streams` names each entry's stream, GUMBEL when None.
        """
        if self._token_hashes is None:
            self._token_hashes = token_hashes(torch.arange(self.vocab_size, device=self.device))
        keys = noise_keys(sampling.seed.tolist(), sampling.position.tolist(), streams or GUMBEL, self.device)
        return gumbel(keys, self._token_hashes)


def _drawn(
    tokens: Tensor, peaks: Tensor, scores: TokenLogprobs | None = None, asking: Sequence[int] = ()
) -> SamplerOutput:
    """Choices [E] under logits whose largest are `peaks` [E]."""
    return SamplerOutput.of(tokens, torch.where(peaks.isfinite(), tokens, -1), scores, asking)


def _flat(rows: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For spans [N, 2]: `rows`, each as often as its span is long, and every index of all spans."""
    lengths = spans[:, 1] - spans[:, 0]
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(rows, lengths), np.arange(lengths.sum()) - first + np.repeat(spans[:, 0], lengths)


@dataclass
class TokenLogprobs:
    """Log-probabilities of N tokens and of the most likely ones, on a device or on the host."""

    own: Tensor  # [N]
    values: Tensor  # [N, K]
    tokens: Tensor  # [N, K]
    counts: Sequence[int]

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> TokenLogprobs:
        """Of tokens int64 [N] under logits [N, V] and of the counts[i] most likely ones, without waiting for the device."""
        parts = []
        widest = min(max(counts), logits.shape[-1])
        most = min(1 << (widest - 1).bit_length() if widest else 0, logits.shape[-1])  # one kernel for several numbers
        if logits.is_cuda and most <= MOST_TOP:
            return cls(*token_logprobs(logits, tokens, most), counts)
        for some, index in zip(logits.split(_LOGPROB_TOKENS), tokens.split(_LOGPROB_TOKENS)):
            some = some.float()
            normalizer = some.logsumexp(-1, keepdim=True)
            best = some.topk(widest)
            parts.append((some.gather(-1, index[:, None]) - normalizer, best.values - normalizer, best.indices))
        own, values, indices = (torch.cat(each) for each in zip(*parts))
        return cls(own.squeeze(-1), values, indices, counts)

    def to_host(self) -> TokenLogprobs:
        """On their way to pinned memory: valid once the device gets there."""
        moved = (one.to("cpu", non_blocking=True) for one in (self.own, self.values, self.tokens))
        return TokenLogprobs(*moved, self.counts)

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """The entry of each of `tokens`, the scored ones. One that is not among its alternatives is appended to them."""
        found = []
        each = zip(tokens, self.own.tolist(), self.counts, self.values.tolist(), self.tokens.tolist())
        for token, logprob, count, lps, ids in each:
            top = list(zip(ids[:count], lps[:count]))
            if count and token not in ids[:count]:
                top.append((token, logprob))
            found.append(TokenLogprob(token, logprob, top))
        return found


def logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability of tokens[i] under logits[i] (float32 [N, V]) and of the counts[i] most likely tokens.

    The most likely token has exactly the first alternative's value. A token that is not among the requested alternatives
    is appended to them.
    """
    if not len(tokens):
        return []
    return TokenLogprobs.of(logits, torch.tensor(tokens, device=logits.device), counts).read(tokens)
