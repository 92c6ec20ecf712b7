"""Requests over time: drawn from a process of arrivals, or a published trace at another rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hone.base.errors import SpecError

Process = Literal["poisson", "gamma", "uniform"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes (s), its tokens, and which blocks of its prompt others may share.

    `blocks` are numbers of equal content, each of `block_tokens` tokens (the last may be cut); empty: it shares nothing.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0

    def tokens(self, number: int) -> list[int]:
        """Token ids of the prompt, equal to those of other requests where blocks are. `number` of the request, from 0 on.

        Without blocks every token is the request's own number, so that no page is found in another's prefix.
        """
        if not self.blocks:
            return [number] * self.prompt_tokens
        ids = [-1 - block for block in self.blocks for _ in range(self.block_tokens)]
        return ids[: self.prompt_tokens] + [number] * (self.prompt_tokens - len(ids))


@dataclass(frozen=True)
class Trace:
    """Requests by time, with where they are from."""

    arrivals: tuple[Arrival, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise SpecError(f"the trace {self.source} has no request", fix="give one with requests")
        times = [one.time_s for one in self.arrivals]
        assert times == sorted(times), "arrivals are in the order of time"

    @property
    def rate(self) -> float:
        """Requests a second: of n requests there are n - 1 gaps. Infinite where all come at once."""
        span = self.arrivals[-1].time_s - self.arrivals[0].time_s
        return (len(self.arrivals) - 1) / span if span else math.inf

    @property
    def burstiness(self) -> float | None:
        """Coefficient of variation of the gaps between arrivals (1 of a Poisson process); None with fewer than two gaps."""
        gaps = np.diff([one.time_s for one in self.arrivals])
        return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None

    def first(self, count: int) -> Trace:
        """The first `count` requests (0: all), the first of them at time 0."""
        kept = self.arrivals[:count] if count else self.arrivals
        start = kept[0].time_s
        return replace(self, arrivals=tuple(replace(one, time_s=one.time_s - start) for one in kept))

    def stretched(self, rate: float) -> Trace:
        """The same requests at `rate` a second: every gap is longer or shorter by one factor, so that bursts stay bursts.

        Raises SpecError where all come at once: no factor spreads them.
        """
        _positive(rate)
        if math.isinf(self.rate):
            raise SpecError(
                "all requests of the trace come at one time", fix="leave rate out, or give a trace with gaps"
            )
        factor = self.rate / rate
        return replace(self, arrivals=tuple(replace(one, time_s=one.time_s * factor) for one in self.arrivals))

    def thinned(self, rate: float, seed: int = 0) -> Trace:
        """A part of the requests, each kept with the same chance, so that `rate` a second are left on average.

        Raises SpecError for more than there are: nothing is made up.
        """
        _positive(rate)
        share = rate / self.rate
        if share > 1:
            raise SpecError(
                f"thinning leaves at most the trace's {self.rate:.4g} requests/s, {rate:.4g} are asked for",
                fix="use scale_by=stretch, or a rate below it",
            )
        keep = np.random.Generator(np.random.Philox(seed)).random(len(self.arrivals)) < share
        return replace(self, arrivals=tuple(one for one, kept in zip(self.arrivals, keep, strict=True) if kept))


def synthetic(
    process: Process,
    rate: float,
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    *,
    cv: float = 1.0,
    seed: int = 0,
) -> Trace:
    """`num_requests` at `rate` a second: gaps are exponential, gamma with coefficient of variation `cv`, or all equal.

    Lengths are drawn evenly from the closed ranges. The same seed gives the same lengths and, up to one factor, the same gaps at
    every rate, so that two rates can be compared.
    """
    _positive(rate)
    random = np.random.Generator(np.random.Philox(seed))
    prompts = random.integers(prompt_tokens[0], prompt_tokens[1] + 1, num_requests)
    outputs = random.integers(output_tokens[0], output_tokens[1] + 1, num_requests)
    if process == "uniform":
        gaps = np.ones(num_requests)
    else:
        shape = 1.0 if process == "poisson" else 1.0 / cv**2
        gaps = random.gamma(shape, 1.0 / shape, num_requests)
    times = np.cumsum(gaps) / rate
    rows = zip((times - times[0]).tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return Trace(tuple(Arrival(*row) for row in rows), f"{process} arrivals at {rate:.4g} requests/s, seed {seed}")


def at_rate(trace: Trace, rate: float, scale_by: Sequence[str] | str = "stretch", seed: int = 0) -> Trace:
    """`trace` at `rate` requests a second, by `stretch` (gaps) or `thin` (requests); never by another process of arrivals."""
    return trace.thinned(rate, seed) if scale_by == "thin" else trace.stretched(rate)


def _positive(rate: float) -> None:
    if not rate > 0 or math.isinf(rate):
        raise SpecError(f"a rate of {rate} requests/s is impossible", fix="give a number above 0")
