"""The steps of a serving run by the scheduler's rules: which sequences decode, which prompts' chunks join them, who waits for pages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Traffic:
    """Requests of a closed loop, `concurrency` in flight: tokens of each prompt (the shared prefix included) and output."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    shared_prefix: int
    concurrency: int
    repeated: bool = False
    """Whether requests of the same sizes were served before, so that a GPU has the graphs of all their steps."""


@dataclass(frozen=True)
class Batching:
    """Batching parameters of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    static: bool = False
    num_pages: int | None = None
    """Of the cache; None: as many as are asked for."""


class StepKind(NamedTuple):
    """`repeats` equal steps: sequences that decode at a mean `context`, and prompts' chunks as (tokens before, tokens).

    The contexts of all that decode begin with the same `shared` tokens, in the same pages.
    """

    decoding: int
    context: float
    chunks: tuple[tuple[int, int], ...]
    samples: int
    repeats: int
    shared: int = 0

    @property
    def num_tokens(self) -> int:
        return self.decoding + sum(count for _, count in self.chunks)


@dataclass
class _Running:
    """A running request."""

    computed: int
    length: int
    left: int

    @property
    def decoding(self) -> bool:
        return self.computed == self.length - 1 and self.computed > 0


def schedule(traffic: Traffic, batching: Batching) -> Iterator[StepKind]:
    """The steps of the run, by the rules of `hone.serve.scheduler`: all that decode, then prompts' chunks.

    With a prefix cache one request computes the shared prefix and the others wait for it (in static batches each of the
    first one computes it). A prompt begins when its pages are free beside one for each running sequence; where those that decode need
    more than there are, the newest gives its pages back and is computed again.
    """
    waiting = deque(zip(traffic.prompts, traffic.outputs))
    most = min(traffic.concurrency, batching.max_num_seqs)
    running: list[_Running] = []
    known = 0  # tokens of the shared prefix in the cache
    prefix = traffic.shared_prefix // batching.block_size if batching.enable_prefix_caching else 0
    while waiting or running:
        if not (batching.static and running):
            while waiting and len(running) < most and not _is_coming(known, running, traffic, batching):
                own = -(-waiting[0][0] // batching.block_size) - prefix
                if running and own > _free_pages(running, prefix, batching) - len(running):
                    break
                prompt, output = waiting.popleft()
                hit = min(known, traffic.shared_prefix, prompt - 1) // batching.block_size * batching.block_size
                running.append(_Running(hit, prompt, output))
        while len(running) > 1 and _growing(running, batching) > _free_pages(running, prefix, batching):
            last = running.pop()
            waiting.appendleft((last.length, last.left))
        decoding = [one for one in running if one.decoding]
        prefilling = [one for one in running if not one.decoding]
        repeats = 1
        if not prefilling:
            repeats = min(one.left for one in decoding)
            if batching.num_pages is not None:
                room = int(_free_pages(running, prefix, batching)) * batching.block_size // len(decoding)
                repeats = max(min(repeats, room), 1)
        context = sum(one.length for one in decoding) / max(len(decoding), 1) + (repeats - 1) / 2
        chunks = _chunks(prefilling, batching.max_num_batched_tokens - len(decoding))
        samples = len(decoding)
        for one in decoding:
            one.computed, one.length, one.left = one.computed + repeats, one.length + repeats, one.left - repeats
        for one, count in chunks:
            one.computed += count
            if one.computed == one.length:
                samples += 1
                one.length, one.left = one.length + 1, one.left - 1
        before = tuple((one.computed - count, count) for one, count in chunks)
        yield StepKind(len(decoding), context, before, samples, repeats, prefix * batching.block_size)
        if batching.enable_prefix_caching:
            known = max([known, *(one.computed for one, _ in chunks)])
        running = [one for one in running if one.left > 0]


def _free_pages(running: list[_Running], prefix: int, batching: Batching) -> float:
    """Pages that no running request has; the `prefix` pages that they share count once."""
    if batching.num_pages is None:
        return math.inf
    return batching.num_pages - prefix - sum(-(-one.length // batching.block_size) - prefix for one in running)


def _growing(running: list[_Running], batching: Batching) -> int:
    """Requests that decode and whose next token begins a page."""
    return sum(one.decoding and one.length % batching.block_size == 0 for one in running)


def _is_coming(known: int, running: list[_Running], traffic: Traffic, batching: Batching) -> bool:
    """Whether a running request computes pages of the shared prefix that the others wait for."""
    if batching.static or not batching.enable_prefix_caching:
        return False
    pages = traffic.shared_prefix // batching.block_size
    return known // batching.block_size < pages and any(one.computed // batching.block_size < pages for one in running)


LEAST_CHUNK = 256
"""Tokens of a prompt below which a chunk is not made smaller for the sake of other prompts: each chunk reads all keys before it."""


def divided(wants: Sequence[int], budget: int) -> list[int]:
    """The tokens that each prompt gets of a step's budget, in order: at most half of the rest while others wait (so that no
    long prompt holds up the others), and what the others leave."""
    counts: list[int] = []
    rest, least = budget, min(LEAST_CHUNK, max(budget // 4, 1))
    for place, want in enumerate(wants):
        most = max(rest // 2, min(rest, least)) if place + 1 < len(wants) else rest
        counts.append(min(want, most))
        rest -= counts[-1]
    for place, want in enumerate(wants):
        more = min(want - counts[place], rest)
        counts[place] += more
        rest -= more
    return counts


def _chunks(prompts: list[_Running], budget: int) -> list[tuple[_Running, int]]:
    counts = divided([one.length - one.computed for one in prompts], budget)
    return [(one, count) for one, count in zip(prompts, counts) if count]
