"""Ends a training within its joules and pauses it outside its hours: projects what is left, shortens before the decay, and waits."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hone.base.artifact import Draft
from hone.base.durable import write_atomic
from hone.base.errors import HoneError, MachineError, SpecError
from hone.base.figure import human_seconds
from hone.base.run import Interrupted, Run
from hone.train.budget.hours import until_open
from hone.train.budget.spec import Energy

if TYPE_CHECKING:
    from hone.measure.clocks.policies.base import Governor
    from hone.train.intervals import Stop
    from hone.train.loop import Trainer
    from hone.train.schedules.base import Schedule
    from hone.train.watch import Watch

_WINDOW = 64
"""Steps over which the joules of a step are averaged, at most."""
_LEAST_STEPS, _LEAST_S = 4, 1.0
"""Steps and seconds of the first projection: counters of energy need a second, and the first steps compile and allocate."""
_LOOK_S = 30.0
"""Seconds between looks at the clock in a pause, in which ranks that wait for each other meet."""


class Paused(Interrupted):
    """The hours of the schedule are over and the training is saved; the same command goes on in the next ones."""

    @property
    def code(self) -> int:
        """EX_TEMPFAIL of sysexits.h: try again later."""
        return 75


class Spending:
    """Joules of all ranks' devices since the training began, with those of killed processes; modelled by `watts` without a sensor.

    `watts` are (watts, where they are from), `joules` are those of this rank's device in this process, `seconds` the seconds of work in all processes. Pauses are left out.
    """

    def __init__(
        self,
        run: Run,
        joules: Callable[[], float | None],
        seconds: Callable[[], float],
        watts: tuple[float, str] | None,
        note: str,
    ) -> None:
        power_w, source = watts or (None, "")
        self._run, self._joules, self._seconds, self._power_w = run, joules, seconds, power_w
        self.before_j = 0.0
        self.left_out_j = 0.0
        measured = all(one is not None for one in run.mesh.gather(joules()))
        self.measured = measured
        self.note = note if measured else f"modelled: seconds times {power_w or 0:.4g} W, {source}; {note}"
        if measured and power_w is not None:
            raise SpecError(
                f"early_stopping.energy.power_w stands in for a sensor, and this machine has one ({note})",
                fix="leave early_stopping.energy.power_w out",
            )
        if not measured and power_w is None:
            raise MachineError(
                f"early_stopping.energy.budget_j needs a reading of joules: {note}",
                fix="give early_stopping.energy.power_w=WATTS, what the machine draws while it trains, or early_stopping.energy.trace=FILE: joules are then modelled",
            )

    def now(self) -> float:
        """Joules so far; all ranks call it together."""
        if not self.measured:
            return (self._power_w or 0.0) * self._run.mesh.from_leader(self._seconds)
        return self.before_j + sum(self._run.mesh.gather(self._joules() or 0.0)) - self.left_out_j


class Budget:
    """The early end and the pauses of one training; in `fit` it stands where `Stop`, which it asks too, stands without it.

    Every choice of another length is stored with its step and made again by a process that goes on from an earlier checkpoint.
    """

    def __init__(self, spec: Energy, stop: Stop, trainer: Trainer, schedule: Schedule, draft: Draft, run: Run) -> None:
        self.spec, self._stop, self._trainer, self._schedule = spec, stop, trainer, schedule
        self.governor: Governor | None = None
        """The policy of this rank's clock; it is told of every step."""
        self._draft, self._run = draft, run
        self.spent_j: float | None = None
        """Joules when the last step was done; None without a budget, or before."""
        self.planned = trainer.steps
        self.hours = run.mesh.from_leader(spec.hours)
        self.pausing = False
        self.pauses, self.paused_s, self.paused_j = 0, 0.0, 0.0
        self.spending: Spending | None = None
        self._joules: Callable[[], float | None] = lambda: None
        self.reserve_steps = 0.0
        """What follows the last step, in steps: the last evaluation."""
        self._history: deque[tuple[int, float, float]] = deque(maxlen=_WINDOW + 1)
        self._changes: dict[int, int] = {}
        self._path = draft.state / "energy.json"
        self._told = ""

    def begin(self, joules: Callable[[], float | None], note: str, reserve_steps: float) -> None:
        """To be called before the first step, when the trainer has been restored. Raises as `Spending` does."""
        stored = self._run.mesh.from_leader(self._stored)
        self._joules = joules
        if self.spec.budget_j is not None:
            self.spending = Spending(self._run, joules, lambda: self._draft.elapsed_s, self.spec.watts(), note)
            self.spending.before_j = stored.get("spent_j", 0.0)
        self.pauses, self.paused_s = stored.get("pauses", 0), stored.get("paused_s", 0.0)
        self.paused_j = stored.get("paused_j", 0.0)
        self._changes = {int(step): steps for step, steps in stored.get("changes", {}).items()}
        self.reserve_steps = reserve_steps
        in_force = [steps for step, steps in sorted(self._changes.items()) if step <= self._trainer.done]
        if in_force:
            self._trainer.steps = in_force[-1]
        self._measure()
        self._look_at_the_clock()

    def _stored(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def keep(self) -> None:
        """Stores time and joules and what else a later process needs; rank 0 calls it at every durable step."""
        self._draft.keep_time()
        if not self.spec.every:
            return
        spent = self._history[-1][1] if self._history else 0.0
        row = {"spent_j": spent, "changes": self._changes, "pauses": self.pauses}
        row |= {"paused_s": self.paused_s, "paused_j": self.paused_j}
        write_atomic(self._path, json.dumps(row).encode())

    @property
    def said(self) -> str:
        """Why the training ended early; '' if it did not."""
        return self._stop.said or self._told

    def reached(self, done: int, loss: float) -> bool:
        """As `Stop.reached`."""
        return self._stop.reached(done, loss)

    def over(self, done: int) -> bool:
        """As `Stop.over`; also sets the trainer's steps to what the joules suffice for, and asks it to stop where the hours are over."""
        if self.governor is not None:
            self.governor.worked()
        if self._stop.over(done):
            return True
        if not self.spec.every or (self._run.mesh.world_size > 1 and done % self.spec.interval):
            return False
        self._measure()
        if self.spending is not None:
            self._choose(done)
            if self._trainer.steps <= done:
                return True
        self._look_at_the_clock()
        self._trainer.stopping = self._trainer.stopping or self.pausing
        return False

    def _measure(self) -> None:
        if self.spending is not None:
            seconds = self._run.mesh.from_leader(lambda: self._draft.elapsed_s)
            self._history.append((self._trainer.done, self.spending.now(), seconds))

    def step_j(self) -> float | None:
        """Joules of a step, over the last ones; None before there are enough."""
        if len(self._history) < 2:
            return None
        (first, before, begun), (last, after, ended) = self._history[0], self._history[-1]
        enough = last - first >= _LEAST_STEPS and ended - begun >= _LEAST_S
        return (after - before) / (last - first) if enough and after > before else None

    def affordable(self, done: int) -> int | None:
        """Steps for which the budget suffices in all, at the present joules a step; None: not known yet."""
        each, spent = self.step_j(), self._history[-1][1]
        assert self.spec.budget_j is not None, "asked with a budget alone"
        if spent >= self.spec.budget_j:
            return done
        if each is None:
            return None
        return done + max(int((self.spec.budget_j - spent) / each - self.reserve_steps), 0)

    def _choose(self, done: int) -> None:
        """Sets the steps of the trainer: those chosen before, of a process that was killed, else by the joules that are left."""
        trainer = self._trainer
        if any(step >= done for step in self._changes):
            trainer.steps = self._changes.get(done, trainer.steps)
            return
        found = self.affordable(done)
        if found is None:
            return
        wanted = min(found, self.planned)
        if trainer.steps == self.planned and self._schedule.kept_after(wanted) > done and self._decays(wanted):
            return  # the stable phase is the same whatever the length: decide when the decay must begin
        if abs(wanted - trainer.steps) < max(1, 0.02 * (trainer.steps - done)):
            return
        if trainer.steps == self.planned:
            self._run.say(
                f"the {self.spec.budget_j:,.0f} J of early_stopping.energy.budget_j suffice for {wanted} of {self.planned} steps at "
                f"{self.step_j() or 0:,.3g} J a step: shortened at step {done}"
            )
        trainer.steps = max(wanted, done)
        self._changes[done] = trainer.steps
        if trainer.steps < self.planned:
            self._told = f"the budget of {self.spec.budget_j:,.0f} J sufficed for no more"

    def _decays(self, steps: int) -> bool:
        """Whether the schedule has a decay of its own, before which every length is alike."""
        return self._schedule.kept_after(steps) < steps

    def _look_at_the_clock(self) -> None:
        if self.hours is not None:
            left = self._run.mesh.from_leader(self._closed_for)
            self.pausing = left != 0.0

    def _closed_for(self) -> float | None:
        assert self.hours is not None, "asked with hours alone"
        return until_open(self.hours, now())

    def through(self, train: Callable[[], None], watch: Watch | None) -> None:
        """Calls `train`, which ends early at `pausing`, and again after each pause, until the training is over or asked to end."""
        while True:
            if self.pausing:
                self.wait()
                if watch is not None:
                    watch.restart_clock()
            train()
            if (
                not self.pausing
                or self._trainer.done == self._trainer.steps
                or any(self._run.mesh.gather(self._run.end.asked()))
            ):
                break
        if self.spending is not None:
            self.spent_j = self.spending.now()

    def wait(self) -> None:
        """Waits for the next hours; all ranks call it when what is done is saved. Raises Paused instead with `pause: exit`.

        Raises Interrupted when the process is asked to end meanwhile, HoneError when no hours follow.
        """
        mesh, trainer = self._run.mesh, self._trainer
        left = mesh.from_leader(self._closed_for)
        if left is None:
            raise HoneError(
                f"{self.spec.schedule} has no hours after now; step {trainer.done} of {trainer.steps} is saved",
                fix="give a schedule with later hours, then the same command goes on",
            )
        if self.spec.pause == "exit":
            self.pauses += 1
            if mesh.leads:
                self.keep()
            where = (
                f"after step {trainer.done} of {trainer.steps}, which is saved"
                if trainer.done
                else "before the first step"
            )
            raise Paused(f"paused {where}: {self.spec.schedule} allows the next in {human_seconds(left)}", 0)
        self._run.say(
            f"paused after step {trainer.done} of {trainer.steps} for {human_seconds(left)}: {self.spec.schedule}"
        )
        begun, joules = monotonic(), self._here()
        while left:
            if any(mesh.gather(self._run.end.asked())):
                raise self._run.end.interrupted(f"ended in a pause after step {trainer.done}, which is saved")
            sleep(min(left, _LOOK_S))
            left = mesh.from_leader(self._closed_for)
            if left is None:
                break
        self._resume(monotonic() - begun, joules)

    def _here(self) -> float:
        """Joules that the devices of all ranks have measured in this process; 0 without a sensor."""
        return sum(self._run.mesh.gather(self._joules() or 0.0))

    def _resume(self, seconds: float, before_j: float) -> None:
        self._draft.leave_out(seconds)
        self.pauses, self.paused_s, self.pausing = self.pauses + 1, self.paused_s + seconds, False
        self.paused_j += self._here() - before_j
        if self.spending is not None:
            self.spending.left_out_j += self._here() - before_j
            self._history.clear()
            self._measure()
        if self.governor is not None:
            self.governor.restart()
        self._run.say(f"going on after step {self._trainer.done}")

    def record(self, draft: Draft) -> None:
        """Records what was spent of the budget, the pauses, and the clock."""
        for figure in [] if self.governor is None else self.governor.figures():
            draft.record(**figure.model_dump(exclude={"estimate"}))
        if self.spending is not None and self.spec.budget_j is not None:
            how = "measured" if self.spending.measured else "modelled"
            note = f"of the steps and evaluations, without pauses; {self.spending.note}"
            draft.record("budget_j", self.spec.budget_j, "J", how="quoted", note="early_stopping.energy.budget_j")
            draft.record("budget_spent_j", self.spent_j, "J", how=how, note=note)
            draft.record("planned_steps", self.planned, "steps", how="quoted", note="without a budget")
        if self.hours is not None:
            draft.record("pauses", self.pauses, "times", note=f"outside the hours of {self.spec.schedule}")
            draft.record("paused_s", self.paused_s, "s", note="waited in place; no part of time_s")
            if self._joules() is not None:
                draft.record("paused_j", self.paused_j, "J", note="of devices that waited; part of energy_j")


def now() -> datetime:
    """The time of day."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Seconds of a clock that is never set back."""
    return time.monotonic()


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)
