"""Failures of long jobs: the best interval between saves, the wall time with failures drawn at random, and with recorded ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hone.base.errors import SpecError


def young_s(save_s: float, mtbf_s: float) -> float:
    """Young's interval between checkpoints, seconds: sqrt(2 * save * mtbf). Young 1974, CACM 17(9)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Daly's interval of work between checkpoints, seconds; the mtbf where a save takes twice as long. Daly 2006, FGCS 22(3), eq. 37."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


def efficiency(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the wall time that is work, with failures at exponential times, also during saves and restarts. Daly 2006, eq. 20."""
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s))


class Run(NamedTuple):
    """A simulated job: wall seconds, failures that hit it, and seconds of work that were done twice."""

    wall_s: float
    failures: int
    lost_s: float


def simulate(
    work_s: float, interval_s: float, save_s: float, restart_s: float, failures_s: Sequence[float] | np.ndarray
) -> Run:
    """One job against failures at the wall times `failures_s` (ascending, seconds from its start).

    After each `interval_s` of work it saves for `save_s`; the last piece of work is not saved. A failure loses what was done
    since the last whole save and costs `restart_s`, which begins again if it fails, too. SpecError: failures end before the job.
    """
    times = np.asarray(failures_s, float)
    now = done = lost = 0.0
    place = hit = 0
    while done < work_s:
        piece = min(interval_s, work_s - done)
        last = done + piece >= work_s
        end = now + piece + (0.0 if last else save_s)
        while place < len(times) and times[place] <= now:
            place += 1
        if place == len(times):
            raise SpecError(
                f"the failures end at {now / 3600:.1f} h and the job has {(work_s - done) / 3600:.1f} h of work left",
                fix="give a longer record of failures, or repeat it",
            )
        if times[place] >= end:
            now, done = end, done + piece
            continue
        lost += min(times[place] - now, piece)
        now = times[place]
        hit += 1
        while True:  # the restart itself may fail
            place += 1
            if place < len(times) and times[place] < now + restart_s:
                now, hit = times[place], hit + 1
                continue
            now += restart_s
            break
    return Run(now, hit, lost)


def exponential(mtbf_s: float, horizon_s: float, seed: int = 0) -> np.ndarray:
    """Failure times up to about `horizon_s` with independent exponential gaps, alike for a seed."""
    draw = np.random.default_rng(seed)
    count = int(horizon_s / mtbf_s * 1.5) + 64
    return np.cumsum(draw.exponential(mtbf_s, count))


def from_trace(gaps_s: Sequence[float] | np.ndarray, horizon_s: float, seed: int = 0, block: int = 8) -> np.ndarray:
    """Failure times drawn from recorded `gaps_s` between failures, in blocks of neighbours, so that clusters stay clusters.

    A moving-block bootstrap (Kunsch 1989). SpecError: fewer than two gaps, or one that is not above 0.
    """
    gaps = np.asarray(gaps_s, float)
    if len(gaps) < 2 or not (gaps > 0).all():
        raise SpecError(
            f"{len(gaps)} gaps between failures, all above 0, are too few or wrong",
            fix="give two or more gaps above 0 s",
        )
    draw, width = np.random.default_rng(seed), min(block, len(gaps))
    drawn: list[np.ndarray] = []
    total = 0.0
    while total < horizon_s:
        start = int(draw.integers(0, len(gaps) - width + 1))
        drawn.append(gaps[start : start + width])
        total += float(drawn[-1].sum())
    return np.cumsum(np.concatenate(drawn))


def read_gaps(path: Path) -> list[float]:
    """Seconds between failures from a file of hours, one a line. SpecError: no such file, a line that is no number above 0, or too few."""
    try:
        hours = [float(line) for line in path.read_text(encoding="utf8").split()]
    except OSError as error:
        raise SpecError(f"failures={path} cannot be read: {error.strerror}", fix="check the path") from None
    except ValueError as error:
        raise SpecError(
            f"failures={path} is no record of failures: {error}", fix="write the hours between two failures, one a line"
        ) from None
    wrong = next((one for one in hours if not (0 < one < math.inf)), None)
    if wrong is not None or len(hours) < 2:
        said = f"has {len(hours)} of them" if wrong is None else f"has {wrong:g}"
        raise SpecError(
            f"failures={path} {said}, where two or more hours between failures are needed, each above 0",
            fix="write the hours between two failures, one a line",
        )
    return [3600 * one for one in hours]
