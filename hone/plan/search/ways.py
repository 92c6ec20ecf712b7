"""A way to reach a goal: one model, machine and configuration of its stages, with its figures on every axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.plan.search.goal import AXES, Goal
from hone.plan.search.machines import Fleet
from hone.plan.search.quality import Known
from hone.plan.search.recipes import recipe_of, train_spec
from hone.plan.search.shapes import Candidate

CLOSED = 0.10
"""Relative half-width of a closed form against the plan of the same configuration (tests/plan/search/test_bounds.py), beside that of the
machine's rates, which all configurations of one machine share."""


@dataclass(frozen=True)
class Format:
    """How the weights of a served model are stored."""

    name: str
    steps: tuple[dict[str, Any], ...]
    """The steps of `hone compress` that make it; none: as it was trained."""
    bits: float
    """Bits of a weight of the layers, its part of a scale included."""
    allocation: dict[str, Any] | None = None
    """The allocation of `hone compress` that chooses the bits of each matrix; None: the steps' own for all."""
    quality: Known | None = None
    """What it costs, where that follows from how its bits are chosen."""

    def compress_fields(self) -> dict[str, Any]:
        """The fields of the compress stage that makes it."""
        more = {} if self.allocation is None else {"allocation": dict(self.allocation)}
        return {"steps": [dict(step) for step in self.steps], **more}


@dataclass(frozen=True)
class Way:
    """One row of a plan. Seconds and bytes are None where the goal has no such stage."""

    candidate: Candidate
    fleet: Fleet
    train: dict[str, Any] | None = None
    """The training's place on each axis, with its `passes`."""
    step_s: float | None = None
    train_hours: float = 0.0
    train_bytes: float | None = None
    format: Format | None = None
    compress_hours: float | None = 0.0
    """None: unknown."""
    engine: dict[str, Any] | None = None
    """Fields of the engine."""
    tpot_s: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    """Output tokens a second of all replicas."""
    serve_hours: float = 0.0
    """Hours to serve the goal's tokens."""
    serve_bytes: float | None = None
    quality: Known | None = None
    evidence: str = "bound"
    """bound, simulated or executed."""
    why: str = ""
    notes: tuple[str, ...] = ()
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def making_hours(self) -> float | None:
        """Of training and compression; None: unknown."""
        return None if self.compress_hours is None else self.train_hours + self.compress_hours

    def hours(self) -> float | None:
        """The axis of time: hours until a trained model is there; without training those of everything, its tokens served."""
        return self.making_hours if self.train is not None else self.all_hours

    @property
    def all_hours(self) -> float | None:
        """Of everything, for which money and energy are spent."""
        return None if self.making_hours is None else self.making_hours + self.serve_hours

    def axes(self) -> dict[str, float | None]:
        """The value on each axis; None: unknown."""
        hours = self.all_hours
        spent = [
            None if hours is None else ask(hours) for ask in (self.fleet.dollars, self.fleet.joules, self.fleet.grams)
        ]
        return dict(zip(AXES, [self.hours(), *spent, self.quality and self.quality.value], strict=True))

    def half(self, axis: str) -> float | None:
        """Half of the interval of an axis; None: it is a bound, or unknown."""
        value = self.axes()[axis]
        if axis == "loss":
            return None if self.quality is None else self.quality.half
        if value is None or self.fleet.spread is None:
            return None
        return value * (self.fleet.spread + (CLOSED if self.evidence == "bound" else 0.0))

    @property
    def group(self) -> str:
        """Ways of one group have the same quality, whatever it is."""
        tokens = self.train["tokens"] if self.train else 0
        batch = self.train["batch_size"] if self.train else 0
        return f"{self.candidate.name} {tokens:g} {batch} {self.format.name if self.format else ''} {(self.engine or {}).get('kv_cache_dtype')}"

    @property
    def memory_bytes(self) -> float:
        """Of a device in the stage that needs most."""
        return max(self.train_bytes or 0.0, self.serve_bytes or 0.0)

    def label(self) -> str:
        """The configuration in one line."""
        parts = []
        if self.train is not None:
            parts.append(layout_label(self.train, self.fleet.count))
        if self.format is not None and (self.format.steps or self.engine):
            parts.append(self.format.name)
        if self.engine is not None:
            names = {
                "tensor_parallel_size": "tp",
                "max_num_seqs": "seqs",
                "max_num_batched_tokens": "step",
                "kv_cache_dtype": "kv",
            }
            parts.append(
                " ".join(f"{short} {self.engine[name]}" for name, short in names.items() if self.engine.get(name))
            )
        return " | ".join(parts)

    def recipe(self, goal: Goal, line: str) -> dict[str, Any]:
        """What `hone run` makes it with."""
        train = None if self.train is None else train_spec(goal, self.candidate, self.train, ranks=self.fleet.count)
        made = None if self.format is None or not self.format.steps else self.format.compress_fields()
        serve = None
        if self.engine is not None:
            asked = goal.requests
            concurrency = int(self.engine["max_num_seqs"])
            serve = {
                "num_requests": max(2 * concurrency, 8),
                "concurrency": concurrency,
                "prompt_tokens": [asked.prompt_tokens] * 2,
                "output_tokens": [asked.output_tokens] * 2,
                "shared_prefix": 0,
                "engine": {name: value for name, value in self.engine.items() if value not in (None, "none")},
            }
        return recipe_of(goal, self.candidate, line, train, made, serve)


def layout_label(train: dict[str, Any], ranks: int) -> str:
    """'dp 16 zero1, tp 8, pp 8 interleaved x4, mb 1 x 32, full, bf16' of a training."""
    found = []
    if ranks > 1:
        data = ranks // (train["tensor"] * train["stages"] * train["context"])
        found.append(f"dp {data}" + (f" {train['sharding']}" if data * train["context"] > 1 else ""))
        found += [
            f"{short} {train[name]}"
            for name, short in (("tensor", "tp"), ("context", "cp"), ("experts", "ep"))
            if train[name] > 1
        ]
        if train["stages"] > 1:
            kind, chunks = train["schedule"]
            found.append(f"pp {train['stages']} {kind}" + (f" x{chunks}" if chunks > 1 else ""))
    kept = "" if train["recomputation"] == "none" else f", {train['recomputation']}"
    return ", ".join([*found, f"mb {train['micro_batch']} x {train['passes']}{kept}, {train['precision']}"])


def table_of(ways: Sequence[Way]) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    """(values, half-widths, groups) of ways for `front`: NaN where unknown."""
    values = np.array([[np.nan if one is None else one for one in way.axes().values()] for way in ways], float).reshape(
        -1, len(AXES)
    )
    halves = np.zeros_like(values)
    for row, way in enumerate(ways):
        for place, axis in enumerate(AXES):
            if axis == "loss":
                halves[row, place] = way.half(axis) or 0.0
            elif not np.isnan(values[row, place]):  # the error of a machine's rates is the same for all that run on it
                halves[row, place] = values[row, place] * (CLOSED if way.evidence == "bound" else CLOSED / 2)
    return values, halves, [way.group if way.quality is None else "known" for way in ways]
