"""Sampling parameters: those of one request, and those of a step's sequences as arrays."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hone.serve.request import SamplingParams
from hone.serve.step import SamplingMetadata
from hone.serve.structured.constraint import Constraint

_MOST = 2**31 - 1
"""Upper bound of counts: no vocabulary or sequence is longer, and clients may send any integer."""

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass
class RequestSampling:
    """How one request's tokens are chosen: its parameters, its seed, and the tokens banned below min_tokens."""

    params: SamplingParams
    ends: tuple[int, ...] = ()  # end-of-text and stop tokens, banned below min_tokens
    seed: int = field(init=False)  # the request's, or a random one
    penalized: bool = field(init=False)  # logits depend on the tokens before

    def __post_init__(self) -> None:
        params = self.params
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.penalized = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        self._floats = tuple(float(getattr(params, name)) for name in _FLOATS)
        self._min_tokens = min(params.min_tokens, _MOST)
        self._whole = (min(params.top_k, _MOST), -1 if params.logprobs is None else params.logprobs, _signed(self.seed))
        self._listed = self.penalized or bool(params.logit_bias) or (params.min_tokens > 0 and bool(self.ends))


@dataclass
class SeqSampling:
    """One sequence's next token: its request and the tokens before it, of which the first `num_prompt` are the prompt."""

    request: RequestSampling
    tokens: Sequence[int]
    num_prompt: int
    constraint: Constraint | None = None


def sampling_of(
    entries: Sequence[SeqSampling], lengths: Sequence[int] | None = None, slots: Slots | None = None
) -> SamplingMetadata:
    """The arrays that a runner samples with: one entry for each, for the token after its first `lengths` ones.

    Lengths, by default those of `tokens`, count tokens that are still in flight. Penalties need a slot of the runner's
    counts: those of `slots`, by default one for each entry, counted from its `tokens`.
    """
    floats = np.array([entry.request._floats for entry in entries], dtype=np.float64).reshape(-1, len(_FLOATS))
    whole = np.array([entry.request._whole for entry in entries], dtype=np.int64).reshape(-1, 3)
    each = [len(entry.tokens) for entry in entries] if lengths is None else lengths
    spans = np.zeros((len(entries), 7), dtype=np.int64)
    slot = np.full(len(entries), -1, dtype=np.int64)
    banned: list[int] = []
    biases: list[tuple[int, float]] = []
    history: list[int] = []
    for index, entry in enumerate(entries):
        request = entry.request
        if not request._listed:
            continue
        begins = len(banned), len(biases), len(history)
        if each[index] - entry.num_prompt < request.params.min_tokens:
            banned += request.ends
        biases += request.params.logit_bias.items()
        if request.penalized:
            slot[index], fresh = (index, True) if slots is None else slots.of(entry)
            history += entry.tokens if fresh else ()
        ends = len(banned), len(biases), len(history)
        pairs = [number for pair in zip(begins, ends) for number in pair]
        spans[index] = *pairs, min(begins[2] + entry.num_prompt, ends[2])
    constrained = np.array([entry.constraint is not None for entry in entries], dtype=np.bool_)
    return SamplingMetadata(
        **{name: floats[:, column] for column, name in enumerate(_FLOATS)},
        top_k=whole[:, 0],
        slot=slot,
        logprobs=whole[:, 1],
        seed=whole[:, 2],
        position=np.array(each, dtype=np.int64),
        banned_below=np.array([e.num_prompt + e.request._min_tokens for e in entries], dtype=np.int64),
        spans=spans,
        banned=np.array(banned, dtype=np.int64),
        bias_tokens=np.array([token for token, _ in biases], dtype=np.int64),
        bias_values=np.array([value for _, value in biases], dtype=np.float64),
        history=np.array(history, dtype=np.int64),
        mask_row=np.where(constrained, np.cumsum(constrained) - 1, -1),
    )


class Slots:
    """Which sequence has which row of a runner's table of token counts: those of one step keep theirs in the next."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, SeqSampling]] = {}  # by id of the entry, which therefore stays alive
        self._free: list[int] = []

    def begin(self, entries: Sequence[SeqSampling]) -> None:
        """Before the step of `entries`: frees the slots of all others."""
        live = {id(entry) for entry in entries}
        for key in [key for key in self._held if key not in live]:
            self._free.append(self._held.pop(key)[0])

    def of(self, entry: SeqSampling) -> tuple[int, bool]:
        """(the slot of `entry`, whether it is new: its tokens are still to be counted)."""
        found = self._held.get(id(entry))
        if found is not None:
            return found[0], False
        slot = self._free.pop() if self._free else len(self._held)
        self._held[id(entry)] = slot, entry
        return slot, True


def _signed(seed: int) -> int:
    """The 64 bits of `seed` as an int64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
