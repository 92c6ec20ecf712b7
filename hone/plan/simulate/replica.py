"""One engine in a simulation: the real scheduler, page manager and prefix cache; a step's tokens come after its predicted time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hone.cost.serve.captured import padded_tokens
from hone.cost.serve.schedule import StepKind
from hone.plan.simulate.steps import StepTimes, kind_of
from hone.serve.eviction.eviction import Eviction
from hone.serve.kv_policies.policy import KeptTokens
from hone.serve.paging.manager import PageManager
from hone.serve.paging.pages import PagePool
from hone.serve.request import Request
from hone.serve.scheduler import Scheduler
from hone.serve.sequence import ScheduledSeq, Seq


@dataclass(frozen=True)
class EngineSizes:
    """What a simulated engine is opened with; the numbers of a real one."""

    num_pages: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    batching: str = "continuous"
    max_delay_s: float = 0.0
    steps_ahead: int = 0
    """Steps launched before the tokens of the last one are read (`Engine`'s asynchronous scheduling)."""
    eviction: Eviction | None = None
    kept: KeptTokens = field(default_factory=KeptTokens)


@dataclass(slots=True)
class Served:
    """What became of one request; times are seconds of the simulation, None while something has not happened."""

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    replica: int = 0
    started_s: float | None = None
    """When the first step that computes some of it was launched."""
    first_s: float | None = None
    last_s: float | None = None
    done: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        """Seconds before the first step that computes some of it."""
        return None if self.started_s is None else self.started_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first: (last - first) / (tokens - 1); None for one token."""
        if self.last_s is None or self.first_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Seconds to the last token."""
        return None if self.last_s is None else self.last_s - self.arrived_s


@dataclass
class Counts:
    """Sums over the steps of a replica."""

    steps: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    output_tokens: int = 0
    sequences: int = 0


class ArrivedPages(PageManager):
    """Pages of a machine that decodes: keys and values of known tokens have come from elsewhere, but for the last one's.

    Those of a preempted sequence are gone, and computed again.
    """

    def allocate(self, seq: Seq, reserve: int = 0) -> bool:
        found = super().allocate(seq, reserve)
        if found and not seq.num_preemptions:
            self.advance(seq, len(seq.tokens) - 1)
        return found


class SimulatedReplica:
    """An engine whose steps take `steps.step_s`. Like `Engine.step` it launches a step, then reads the oldest one under way.

    `on_token` is called with a request and the time after each of its first and last tokens. `arrived`: requests come with the
    keys and values of their tokens.
    """

    def __init__(
        self,
        sizes: EngineSizes,
        steps: StepTimes,
        clock: Callable[[], float],
        on_token: Callable[[Served, float], None],
        index: int = 0,
        *,
        arrived: bool = False,
    ) -> None:
        pool = PagePool(
            sizes.num_pages,
            sizes.block_size,
            enable_prefix_caching=sizes.enable_prefix_caching,
            eviction=sizes.eviction,
            clock=clock,
        )
        pages = ArrivedPages if arrived else PageManager
        self.scheduler = Scheduler(
            pages(pool, max_num_batched_tokens=sizes.max_num_batched_tokens, kept=sizes.kept),
            max_num_seqs=sizes.max_num_seqs,
            batching=sizes.batching,  # type: ignore[arg-type]
            max_delay_s=sizes.max_delay_s,
            clock=clock,
        )
        self.index, self.counts, self.sizes = index, Counts(), sizes
        self._steps, self._clock, self._on_token = steps, clock, on_token
        self._flying: deque[tuple[list[ScheduledSeq], float]] = deque()
        self._served: dict[Seq, Served] = {}
        self._device_free_s = 0.0
        self._arrivals = 0
        self._sizes: set[int] = set()
        """Padded tokens of the steps with prompts so far: a size is captured when it comes a second time."""

    @property
    def outstanding(self) -> int:
        """Requests that are waiting or running."""
        return len(self._served)

    @property
    def computes(self) -> bool:
        """Whether a step is under way."""
        return bool(self._flying)

    def add(self, served: Served, prompt: list[int]) -> None:
        """Queues a request; the tokens that it was answered elsewhere belong to its prompt here, and are computed again."""
        served.replica = self.index
        end = min(served.prompt_tokens + served.output_tokens, self.sizes.max_model_len)
        seq = Seq(Request("", prompt + [served.number] * served.done), self._arrivals, end)
        self._arrivals += 1
        self._served[seq] = served
        self.scheduler.add(seq)

    def take(self, *, all_of_them: bool) -> list[Served]:
        """Takes away unfinished requests, to be served elsewhere: all of them, or those of which nothing was computed."""
        return self._take([(seq, one) for seq, one in self._served.items() if all_of_them or one.started_s is None])

    def take_newest(self, most: int) -> list[Served]:
        """Takes away the newest requests of which nothing was computed, at most so many, the newest first."""
        waiting = [(seq, one) for seq, one in self._served.items() if one.started_s is None]
        return self._take(waiting[::-1][: max(0, most)])

    def _take(self, left: list[tuple[Seq, Served]]) -> list[Served]:
        for seq, _ in left:
            self.scheduler.finish(seq)
            del self._served[seq]
        return [one for _, one in left]

    def step(self) -> float | None:
        """What the engine's thread does now; the time until which it then waits, None when it waits for a request."""
        now = self._clock()
        while self._flying and self._flying[0][1] <= now:
            self._read(now)
        while len(self._flying) <= self.sizes.steps_ahead:
            delay = self.scheduler.delay_s
            scheduled = self.scheduler.schedule().seqs
            if not scheduled:
                if self._flying:
                    break
                assert delay > 0 or not self._served, f"{len(self._served)} requests wait and nothing can run"
                return now + delay if delay > 0 else None
            self._launch(scheduled, now)
        return self._flying[0][1]

    def _launch(self, scheduled: list[ScheduledSeq], now: float) -> None:
        kind = kind_of(scheduled)
        size = padded_tokens(kind.num_tokens)
        took = self._steps.step_s(kind, again=bool(kind.chunks) and size in self._sizes)
        if kind.chunks:
            self._sizes.add(size)
        begins = max(now, self._device_free_s)
        self._device_free_s = begins + took
        self._flying.append((scheduled, self._device_free_s))
        self._count(kind, took)
        for item in scheduled:
            served = self._served[item.seq]
            if served.started_s is None:
                served.started_s, served.cached_tokens = now, item.seq.num_cached
        self.scheduler.launched(scheduled)

    def _count(self, kind: StepKind, took: float) -> None:
        counts = self.counts
        counts.steps += 1
        counts.busy_s += took
        counts.tokens += kind.num_tokens
        counts.output_tokens += kind.samples
        counts.sequences += kind.decoding + len(kind.chunks)

    def _read(self, now: float) -> None:
        """The tokens of the oldest step under way are known: what `Engine` does with them."""
        scheduled, _ = self._flying.popleft()
        pages = self.scheduler.pages
        for item in scheduled:
            seq = item.seq
            if seq.state == "done":
                continue
            seq.num_in_flight -= item.samples
            if not item.samples:
                pages.advance(seq, seq.num_computed)
                continue
            served = self._served[seq]
            seq.tokens.append(served.number)  # the request's own: no page of an answer is another's
            served.done += 1
            if len(seq.tokens) >= seq.page_end:
                pages.advance(seq, seq.num_computed)
            ended = len(seq.tokens) >= seq.max_tokens
            if served.first_s is None:
                served.first_s = now
            elif not ended:
                continue
            if ended:
                served.last_s, served.preemptions = now, seq.num_preemptions
                self.scheduler.finish(seq)
                del self._served[seq]
            self._on_token(served, now)
