"""More steps than a training was begun for: whether what is done is the beginning of the longer one, and if not, why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hone.base.errors import DriftError
from hone.base.stage import Stage
from hone.train.continuation.keep import newest_step
from hone.train.continuation.start import differs, told_difference
from hone.train.schedules.base import span

_LENGTH = ("steps", "tokens", "schedule")
_BY_SIZE = ("fixed", "proportional", "temperature")
"""Mixtures whose weights depend on the number of steps only where a cap on epochs takes effect."""


class Prolonged(Stage):
    """A training, of which more steps may be asked for than it was begun for."""

    def goes_on(self, begun: Any, state: Path) -> bool:
        """As `Spec.goes_on`."""
        return goes_on(self, begun, state)

    def after(self, finished: Any, folder: Path) -> str:
        """As `Spec.after`."""
        return after(self, finished, folder)


def goes_on(spec: Any, begun: Any, state: Path) -> bool:
    """Whether the checkpoints in `state`, of a train spec `begun`, are those that a training of `spec` would have.

    Raises DriftError when only the length differs, but steps done would have been others in a training of that length.
    """
    total, steps = length(begun), length(spec)
    if total is None or steps is None or others(spec, begun) or spec.checkpoint.load == "schedule":
        return False
    done = newest_step(state / "checkpoints")
    if done >= steps:
        return False
    partial = state.parent
    step = differs(begun.schedule, total, spec.schedule, steps, done)
    fix = f"give the earlier spec again and it resumes, or drop that work with --redo={partial.name.removesuffix('.partial')}"
    if step is not None:
        warmup = span(begun.schedule.warmup, total)
        same = spec.schedule.model_copy(update={"warmup": warmup})
        if differs(begun.schedule, total, same, steps, done) is None:
            way = f"give --schedule.warmup={warmup}, the steps that its warm-up has; {fix}"
        else:
            way = (
                f"{fix}. When it is finished with --checkpoint.keep=optimizer, another training goes on from it with "
                "--checkpoint.load=optimizer and a schedule of its own; schedule wsd can be prolonged before its decay"
            )
        raise DriftError(
            f"{partial} has {done} steps done, which a training of {steps} steps would have done otherwise: "
            f"{told_difference(begun.schedule, total, spec.schedule, steps, step)}",
            fix=way,
        )
    why = _other_order(spec, steps / total, partial) if steps != total else ""
    if why:
        raise DriftError(f"{partial} has {done} steps done, and for {steps} steps {why}", fix=fix)
    return True


def after(spec: Any, finished: Any, folder: Path) -> str:
    """How a training of `spec` is made by going on from the one in `folder`, in words; '' when more than its length differs."""
    total, steps = length(finished), length(spec)
    if total is None or steps is None or steps <= total or others(spec, finished):
        return ""
    if not finished.checkpoint.keep.optimizer:
        return (
            f"go on from its weights with --from.model={folder}, another --out and the steps that are left "
            "(checkpoint.keep: optimizer would have kept what a longer training needs); or "
        )
    before = finished.schedule.model_copy(update={"warmup": span(finished.schedule.warmup, total)})
    now = spec.schedule.model_copy(update={"warmup": before.warmup}) if spec.schedule.warmup < 1 else spec.schedule
    exact = differs(before, total, now, steps, before.kept_after(total)) is None
    counted = (
        "steps counts those done too" if exact else f"a new schedule, since {spec.schedule.kind} cannot be prolonged"
    )
    load = "schedule" if exact else "optimizer"
    return f"go on from it with --from.model={folder} --checkpoint.load={load} and another --out ({counted}); or "


def length(spec: Any) -> int | None:
    """The steps of a training; None when the data say it, by their length or by the padding beside `tokens`."""
    return spec.steps


def others(spec: Any, begun: Any) -> bool:
    """Whether more than the length differs."""
    one, other = ({**each.identity(), **dict.fromkeys(_LENGTH)} for each in (spec, begun))
    return one != other


def _other_order(spec: Any, longer: float, partial: Path) -> str:
    """Why a training `longer` times as long would have read other sequences than the one in `partial`; '' when it would not."""
    from hone.feed.mix.base import Chosen
    from hone.feed.mix.reading import MIXTURE_FILE

    if spec.curriculum.kind != "random":
        return f"curriculum {spec.curriculum.kind} has another order"
    path = partial / MIXTURE_FILE
    if spec.mixture is None or not path.exists():
        return ""
    shares = Chosen.read(json.loads(path.read_text(encoding="utf8"))).shares
    most = longer * max(share.epochs for share in shares)
    free = spec.mixture.kind in _BY_SIZE and not any(share.capped for share in shares)
    return "" if free and most <= spec.mixture.max_epochs else f"mixture {spec.mixture.kind} has other weights"
