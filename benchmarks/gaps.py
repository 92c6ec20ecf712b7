"""Where a GPU's time goes in a trace of training steps: kernels, communication beside them, and each kind of pause with what it waited for.

    python -m benchmarks.gaps TRACE.json.gz --steps 4        # of a trace that `benchmarks.train_layouts --trace-folder` kept

The trace is one of torch's profiler with its CUDA activities: GPU events, and the host's calls of the CUDA runtime, joined by a number. A pause is a
time without a computing kernel. It is put down to

- transfer: a collective or a copy between GPUs is under way for most of it;
- host: the call that launched the kernel after it came later than the pause began; `in` says which blocking call the host was in, or 'launching';
- order: that kernel was launched in time, and waited for an event of another stream, or for its own stream's small operations.
"""

from __future__ import annotations

import argparse
import gzip
import json
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Interval = tuple[float, float]

BLOCKING = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMem", "cudaMemcpy", "cudaEventQuery")
"""Calls of the runtime in which a host may stand still; a launch is none of them."""

SHORT_US = 3.0
"""Shorter pauses are the GPU's own between two kernels; they are counted together."""


class Pause(NamedTuple):
    """A time without a computing kernel, in microseconds."""

    seconds: float
    kind: str
    """transfer, host or order; 'short' where it is shorter than SHORT_US."""
    at: str
    """'KERNEL BEFORE -> KERNEL AFTER'."""
    inside: str
    """For a host's pause the blocking call that it was in longest, or 'launching'; for a transfer its name."""


class Account(NamedTuple):
    """Of one step, on average over the steps of the trace without its first and last; seconds."""

    step_s: float
    computing_s: float
    moving_s: float
    exposed_s: float
    """Communication beside which no kernel computed."""
    idle_s: float
    """Neither computing nor communicating."""
    pauses: list[tuple[str, str, str, float, float]]
    """(kind, in, at, seconds a step, times a step), largest first."""
    kernels: list[tuple[str, float, float]]
    """(name, seconds a step, launches a step), largest first."""
    blocking: list[tuple[str, float, float]]
    """(call of the host, seconds a step, calls a step), largest first."""
    launches: float
    """Kernels, copies and fills a step."""

    @property
    def hidden(self) -> float | None:
        """Share of the communication beside computing kernels; None: there is none."""
        return 1 - self.exposed_s / self.moving_s if self.moving_s else None

    @property
    def busy(self) -> float:
        """Share of the time in which the GPU computes."""
        return self.computing_s / self.step_s

    def lines(self, most: int = 14) -> list[str]:
        """For people."""
        hidden = "none" if self.hidden is None else f"{self.hidden:.0%} hidden"
        said = [
            f"step {self.step_s * 1e3:.1f} ms: computing {self.computing_s * 1e3:.1f} ({self.busy:.1%}), communication "
            f"{self.moving_s * 1e3:.1f} ({hidden}, {self.exposed_s * 1e3:.1f} exposed), neither {self.idle_s * 1e3:.1f}; "
            f"{self.launches:.0f} launches",
            "pauses without a computing kernel, ms a step (times): what for, between which kernels",
        ]
        said += [
            f"  {s * 1e3:7.3f} ({times:5.1f})  {kind:<8} {inside[:34]:<34} {at}"
            for kind, inside, at, s, times in self.pauses[:most]
        ]
        said.append("calls in which the host stands still, ms a step (calls)")
        said += [f"  {s * 1e3:7.3f} ({times:5.1f})  {name}" for name, s, times in self.blocking[:8]]
        said.append("kernels, ms a step (launches)")
        said += [f"  {s * 1e3:7.3f} ({times:6.1f})  {name[:110]}" for name, s, times in self.kernels[: 2 * most]]
        return said


def account(events: Iterable[Mapping[str, Any]], steps: int) -> Account | None:
    """The account of `traceEvents` of a trace of `steps` steps one after the other; None where nothing ran on a GPU."""
    computing, moving, calls, launched = [], [], [], {}
    for one in events:
        kind, name = one.get("cat", ""), str(one.get("name", ""))
        if one.get("ph") != "X":
            continue
        begin, end = float(one["ts"]), float(one["ts"]) + float(one.get("dur", 0))
        link = one.get("args", {}).get("correlation")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            (moving if moves(name) else computing).append((begin, end, name, link))
        elif kind in ("cuda_runtime", "cuda_driver"):
            calls.append((begin, end, name))
            launched[link] = begin
    if not computing:
        return None
    every = sorted(computing + moving)
    first, last = every[0][0], max(end for _, end, *_ in every)
    period = (last - first) / steps
    window = (first + period, last - period) if steps > 2 else (first, last)
    count = max(steps - 2, 1) if steps > 2 else steps
    computed, moved = (union(cut(((a, b) for a, b, *_ in some), *window)) for some in (computing, moving))
    both = union([*computed, *moved])
    per = 1e6 * count
    names, times = Counter(), Counter()
    for begin, end, name, _ in computing:
        if window[0] <= begin < window[1]:
            names[name] += end - begin
            times[name] += 1
    stands: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    blocked = [one for one in calls if any(word in one[2] for word in BLOCKING)]
    for begin, end, name in blocked:
        if window[0] <= begin < window[1]:
            stands[name][0] += end - begin
            stands[name][1] += 1
    found = _pauses(sorted(computing), sorted(moving), blocked, launched, window)
    summed: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for one in found:
        summed[one.kind, one.inside, one.at][0] += one.seconds
        summed[one.kind, one.inside, one.at][1] += 1
    listed = [(*key, spent / per, number / count) for key, (spent, number) in summed.items()]
    return Account(
        step_s=(window[1] - window[0]) / per,
        computing_s=length(computed) / per,
        moving_s=length(moved) / per,
        exposed_s=(length(both) - length(computed)) / per,
        idle_s=(window[1] - window[0] - length(both)) / per,
        pauses=sorted(listed, key=lambda one: -one[3]),
        kernels=[(name, spent / per, times[name] / count) for name, spent in names.most_common()],
        blocking=sorted(((name, s / per, n / count) for name, (s, n) in stands.items()), key=lambda one: -one[1]),
        launches=sum(window[0] <= begin < window[1] for begin, *_ in every) / count,
    )


def _pauses(
    computing: Sequence[tuple[float, float, str, Any]],
    moving: Sequence[tuple[float, float, str, Any]],
    blocked: Sequence[tuple[float, float, str]],
    launched: Mapping[Any, float],
    window: Interval,
) -> list[Pause]:
    """The pauses inside the window, in order."""
    found, until, before = [], computing[0][1], computing[0][2]
    starts = [one[0] for one in moving]
    for begin, end, name, link in computing[1:]:
        if begin > until and window[0] <= until and begin <= window[1]:
            seconds, at = begin - until, f"{short(before)} -> {short(name)}"
            near = moving[max(0, bisect_right(starts, until) - 8) : bisect_right(starts, begin)]
            spans = Counter({one[2]: 0.0 for one in near})
            for one in near:
                spans[one[2]] += max(0.0, min(one[1], begin) - max(one[0], until))
            travels = length(union(cut(((one[0], one[1]) for one in near), until, begin)))
            call = launched.get(link)
            if seconds < SHORT_US:
                found.append(Pause(seconds, "short", "", ""))
            elif travels > seconds / 2:
                found.append(Pause(seconds, "transfer", at, short(spans.most_common(1)[0][0])))
            elif call is not None and call > until:
                within = Counter()
                for one in blocked:
                    within[one[2]] += max(0.0, min(one[1], call) - max(one[0], until))
                inside, spent = within.most_common(1)[0] if within else ("", 0.0)
                found.append(Pause(seconds, "host", at, inside if spent > (call - until) / 4 else "launching"))
            else:
                found.append(Pause(seconds, "order", at, ""))
        if end > until:
            until, before = end, name
    return found


def waiting_lines(step: Callable[[], Any]) -> Counter[str]:
    """How often each line of Python made the host wait for the GPU in a call of `step`, as torch warns of it: reads of single numbers, shapes that
    depend on values, copies from or to memory that is not pinned. Waits for events, which are meant, are not among them."""
    import torch

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    told = [one for one in caught if "synchroniz" in str(one.message)]
    return Counter(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in told)


def moves(name: str) -> bool:
    """Whether a GPU event is communication: a collective of NCCL, or a copy between GPUs."""
    return "nccl" in name.lower() or "PtoP" in name


def short(name: str) -> str:
    """A kernel's name without its types."""
    head = name.replace("void ", "").split("<")[0].split("(")[0]
    inner = name.split("<", 1)[1][:60] if "elementwise" in head and "<" in name else ""
    parts = [one for one in inner.replace("::", ",").replace("<", ",").split(",") if "unctor" in one]
    return head.split("::")[-1][:44] + (f"[{parts[0].strip()[:28]}]" if parts else "")


def cut(intervals: Iterable[Interval], first: float, last: float) -> list[Interval]:
    """The parts of `intervals` between both times."""
    inside = ((max(start, first), min(end, last)) for start, end in intervals)
    return [(start, end) for start, end in inside if start < end]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Their sum."""
    return sum(end - start for start, end in intervals)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, packed or not."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        return json.load(file)["traceEvents"]  # type: ignore[no-any-return]


def main() -> None:
    """Prints the account of a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=4, help="steps of the trace")
    arguments = parser.parse_args()
    found = account(read(arguments.trace), arguments.steps)
    print("\n".join(found.lines()) if found else "nothing ran on a GPU")


if __name__ == "__main__":
    main()
