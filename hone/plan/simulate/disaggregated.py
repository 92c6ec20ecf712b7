"""Prefill and decode on machines of their own: two fleets in one simulation, the links between them, and how to divide machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from hone.base.errors import SpecError
from hone.base.figure import Figure
from hone.cost.catalogue.read import catalogue
from hone.cost.serve.schedule import StepKind
from hone.cost.serve.serving import Serving
from hone.plan.simulate.events import EventLoop
from hone.plan.simulate.fleet import Fleet
from hone.plan.simulate.replica import EngineSizes, Served
from hone.plan.simulate.steps import StepTimes


@dataclass(frozen=True)
class Disaggregation:
    """Replicas that only prefill and replicas that only decode. Each prefill replica sends over a link of its own.

    A prompt's keys and values leave layer by layer while it is computed, one prompt after another: they have arrived when the link
    has carried them, and not before the last layer's came after the end of the prefill. Zhong et al. 2024 (DistServe),
    arXiv:2401.09670; Patel et al. 2024 (Splitwise), arXiv:2311.18677.
    """

    prefill: int
    decode: int
    link_bytes_per_s: float
    cache_bytes: Callable[[int], float]
    """Bytes of keys and values of a prompt of so many tokens."""
    num_layers: int


class TwoFleets:
    """Requests go to a prefill replica, which answers the first token, then over its link to a decode replica, for the others."""

    def __init__(
        self,
        loop: EventLoop,
        sizes: EngineSizes,
        steps: StepTimes,
        on_token: Callable[[Served, float], None],
        how: Disaggregation,
    ) -> None:
        self.how = how
        self.decode = Fleet(loop, sizes, steps, on_token, most=how.decode, arrived=True)
        self.prefill = Fleet(loop, sizes, steps, self._prefilled, most=how.prefill)
        for fleet, count in ((self.prefill, how.prefill), (self.decode, how.decode)):
            for _ in range(count):
                fleet.start()
        self.transfers_s: list[float] = []
        """Of each request, the seconds from its first token until its keys and values are on a decode replica."""
        self.sent_bytes = 0.0
        self.most_bytes = 0.0
        """The most bytes that waited for the link of one prefill replica, or were on it."""
        self._loop, self._on_token = loop, on_token
        self._whole: dict[int, tuple[Served, list[int]]] = {}
        self._free_s = [0.0] * how.prefill
        self._leaving = [0.0] * how.prefill

    def submit(self, served: Served, tokens: list[int]) -> None:
        """Gives a request to a prefill replica."""
        self._whole[served.number] = served, tokens
        self.prefill.submit(Served(served.number, served.arrived_s, served.prompt_tokens, 1), tokens)

    def finished(self, served: Served) -> None:
        """To be called when a request is done."""
        self.decode.finished(served)

    def _prefilled(self, part: Served, now: float) -> None:
        self.prefill.finished(part)
        served, tokens = self._whole.pop(part.number)
        served.started_s, served.first_s, served.done = part.started_s, now, 1
        served.cached_tokens, served.preemptions, served.replica = part.cached_tokens, part.preemptions, part.replica
        if served.output_tokens == 1:
            served.last_s = now
            self._on_token(served, now)
            return
        self._on_token(served, now)
        size, rate, place = self.how.cache_bytes(part.prompt_tokens), self.how.link_bytes_per_s, part.replica
        assert part.started_s is not None, "it has a token"
        begins = max(self._free_s[place], part.started_s)
        ends = max(begins + size / rate, now + size / self.how.num_layers / rate)
        self._free_s[place] = ends
        self._leaving[place] += size
        self.most_bytes = max(self.most_bytes, self._leaving[place])
        self.sent_bytes += size
        self.transfers_s.append(ends - now)
        self._loop.at(ends, partial(self._arrived, served, tokens, place, size))

    def _arrived(self, served: Served, tokens: list[int], place: int, size: float) -> None:
        self._leaving[place] -= size
        self.decode.submit(served, tokens)

    def figures(self, end_s: float, bound: bool) -> list[Figure]:
        """What the division costs: transfers, the links' use, and how busy each side is."""
        note = "step times are limits of the hardware: nothing is calibrated" if bound else "predicted step times"
        rows: list[tuple[str, float | None, str, str]] = []
        for percent in (50, 99):
            value = float(np.percentile(self.transfers_s, percent)) if self.transfers_s else None
            rows.append(
                (f"kv_transfer_p{percent}_s", value, "s", "from the first token until keys and values have arrived")
            )
        count = max(len(self.transfers_s), 1)
        carried = self.how.prefill * self.how.link_bytes_per_s * end_s
        rows += [
            ("kv_bytes_per_request", self.sent_bytes / count, "B", "keys and values of a prompt"),
            ("kv_waiting_bytes", self.most_bytes, "B", "most at once at one prefill replica, beside the pages of its own steps"),
            ("link_utilization", self.sent_bytes / carried if carried else None, "fraction", "of what the links carry"),
        ]  # fmt: skip
        for name, fleet in (("prefill", self.prefill), ("decode", self.decode)):
            busy = sum(one.replica.counts.busy_s for one in fleet.members)
            alive = sum(one.alive_s(end_s) for one in fleet.members)
            rows.append(
                (f"{name}_utilization", busy / alive if alive else None, "fraction", f"of a {name} replica's time")
            )
        return [
            Figure(name=name, value=value, unit=unit, how="modelled", n=count, note=f"{more}; {note}")
            for name, value, unit, more in rows
        ]


@dataclass(frozen=True)
class Split:
    """`prefill` and `decode` machines. Rates are requests/s of one machine that does nothing else."""

    prefill: int
    decode: int
    prefill_rate: float
    decode_rate: float

    def rate(self, link_rate: float = float("inf")) -> float:
        """Requests/s of all: the slower side, or the transfers of `link_rate` requests/s that a prefill machine's link carries."""
        return min(self.prefill * min(self.prefill_rate, link_rate), self.decode * self.decode_rate)


def best_split(machines: int, prefill_rate: float, decode_rate: float, link_rate: float = float("inf")) -> Split:
    """The split of `machines` with the highest rate; of equal ones that with the most decode machines. Raises SpecError below two."""
    for name, value in (("prefill_rate", prefill_rate), ("decode_rate", decode_rate), ("link_rate", link_rate)):
        if not value > 0:
            raise SpecError(f"{name} is {value}", fix="give a number above 0")
    if machines < 2:
        raise SpecError(f"{machines} machines cannot be divided into prefill and decode", fix="give at least two")
    splits = [Split(count, machines - count, prefill_rate, decode_rate) for count in range(1, machines)]
    return max(splits, key=lambda one: one.rate(link_rate))


def break_even(
    how: Disaggregation, steps: StepTimes, sizes: EngineSizes, prompt_tokens: int, output_tokens: float
) -> list[Figure]:
    """The link at which a mean prompt's keys and values arrive with the end of its prefill, and the best division of as many machines.

    Rates are those of full machines: prompts one after another in steps of at most max_num_batched_tokens, and decode steps of as
    many sequences as run at once and have pages.
    """
    prefill_s, begin = 0.0, 0
    while begin < prompt_tokens:
        count = min(prompt_tokens - begin, sizes.max_num_batched_tokens)
        prefill_s += steps.step_s(StepKind(0, 0.0, ((begin, count),), 1, 1), again=True)
        begin += count
    length = prompt_tokens + output_tokens
    seqs = max(1, min(sizes.max_num_seqs, int(sizes.num_pages * sizes.block_size / length)))
    decode_s = steps.step_s(StepKind(seqs, prompt_tokens + output_tokens / 2, (), seqs, 1))
    decode_rate = seqs / (decode_s * max(output_tokens - 1, 1))
    size = how.cache_bytes(prompt_tokens)
    best = best_split(how.prefill + how.decode, 1 / prefill_s, decode_rate, how.link_bytes_per_s / size)
    mean = f"a prompt of {prompt_tokens} tokens, {prefill_s * 1e3:.3g} ms"
    return [
        Figure(name="break_even_link_bytes_per_s", value=size / prefill_s, unit="B/s", how="modelled", note=f"{mean}: its keys and values arrive with its end"),
        Figure(name="best_prefill_replicas", value=best.prefill, unit="", how="modelled", note=f"of {how.prefill + how.decode}: {best.rate(how.link_bytes_per_s):.3g} requests/s, {1 / prefill_s:.3g} a prefill replica, {decode_rate:.3g} a decode replica"),
    ]  # fmt: skip


def disaggregation_of(prefill: int, decode: int, link: str, serving: Serving) -> Disaggregation:
    """From a spec's fields. `link` is a name of the catalogue or bytes/s. Raises SpecError for neither."""
    try:
        rate = float(link)
    except ValueError:
        row = catalogue().link(link)
        rate = (row.bytes_per_s if row else None) or 0.0
    if not rate > 0:
        raise SpecError(
            f"disaggregation.link={link} has no rate", fix="give bytes/s above 0, as 50e9, or a link with one"
        )
    dims, width = serving.dims, serving.cached_width
    return Disaggregation(
        prefill, decode, rate, lambda tokens: width * dims.state_values(tokens), max(dims.num_layers, 1)
    )
