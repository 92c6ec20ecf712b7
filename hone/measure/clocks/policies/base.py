"""The base of clock policies: a spec begins a governor, which is told of every piece of work and sets the GPU that is held for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from hone.base.errors import MachineError
from hone.base.figure import Figure
from hone.base.table import Technique
from hone.measure.clocks.fit import ClockModel, modelled
from hone.measure.clocks.held import FULL, Held, Setting
from hone.measure.clocks.nvml import IDLE, NvmlError
from hone.measure.energy import counter_of

Phase = Literal["train", "prefill", "decode"]

FOLLOWS: dict[Phase, float] = {"train": 0.85, "prefill": 0.9, "decode": 0.15}
"""The part of a phase's seconds that is taken to follow the clock where no clock can be set: an assumption of modelled figures.
Products of many rows follow it; decoding reads weights and keys, whose memory has a clock of its own."""


class Clock(Technique):
    """Which clock or power limit a GPU has while it works. Not part of a stage's identity: the results are the same."""

    never_waits: ClassVar[bool] = False
    """Whether it compares times of a unit of work, which says nothing of a server that waits for requests."""

    def check(self) -> None:
        """Raises SpecError where its fields ask for nothing."""

    def begin(self, held: Held, **more: Any) -> Governor:
        """The governor of the GPU that is `held`; `more` as for `Governor`."""
        raise NotImplementedError


class Tried(NamedTuple):
    """A setting and what a unit of work took under it."""

    setting: Setting
    time_s: float
    energy_j: float
    units: float


class Governor:
    """Sets one GPU while work goes on; `worked` is called after every piece of it, when the device has ended it.

    Where the driver refuses, it says so once with what is advised, and works on at full clocks. `tried` are the settings that were measured.
    """

    def __init__(
        self, held: Held, *, say: Callable[[str], None] = lambda line: None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.held, self.say, self.now = held, say, now
        self.refused = ""
        """Why nothing can be set; '' where it can."""
        self.tried: list[Tried] = []
        self.changes = 0
        self._counter, self.note = counter_of(held.gpu, "NVML", now)
        self._rest_w = _resting(held)
        self._begun: tuple[float, int] | None = None
        self._units, self._phases = 0.0, dict.fromkeys(FOLLOWS, 0.0)

    def worked(self, units: float = 1.0, phase: Phase = "train") -> None:
        """`units` (steps, tokens) were done in `phase` since the last call."""
        if self.refused:
            if self._begun is None:
                self._begun = self.now(), self._read()
            else:
                self._units += units
                self._phases[phase] += units
            return
        self.decide(units, phase)

    def restart(self) -> None:
        """To be called after a pause, which is no part of the work: what is being measured begins anew."""
        self._begun, self._units, self._phases = None, 0.0, dict.fromkeys(FOLLOWS, 0.0)

    def decide(self, units: float, phase: Phase) -> None:
        """Chooses the setting of what comes; a policy that is constant does nothing."""

    def set(self, setting: Setting) -> bool:
        """Sets `setting`; False where it is refused."""
        if self.refused:
            return False
        try:
            changed = setting != self.held.now
            self.held.set(setting)
            self.changes += changed
        except NvmlError as error:
            if error.invalid:
                raise MachineError(
                    f"{setting} cannot be set: {error}",
                    fix="take a clock that nvidia-smi -q -d SUPPORTED_CLOCKS lists, and a limit between those of nvidia-smi -q -d POWER",
                ) from None
            if not error.refused:
                raise
            self.refused = str(error)
            self.say(f"note: {setting} is not set: {error}; {self.advice(setting)}")
            return False
        return True

    def advice(self, setting: Setting) -> str:
        """What to do where `setting` is refused."""
        ways = [f"nvidia-smi -lgc {setting.sm_mhz}"] if setting.sm_mhz is not None else []
        ways += [f"nvidia-smi -pl {setting.limit_w:.0f}"] if setting.limit_w is not None else []
        return f"it needs an administrator: {' and '.join(ways) or 'nvidia-smi -lgc'}. What it would save is modelled"

    def _read(self) -> int:
        return 0 if self._counter is None else self._counter.read()

    def _joules(self, before: int) -> float | None:
        return None if self._counter is None else self._counter.joules_between(before, self._read())

    def model(self) -> ClockModel | None:
        """The model of the work that was done at full clocks, where nothing could be set; None without a reading or work."""
        joules = self._joules(self._begun[1]) if self._begun else None
        if not joules or not self._units or self._rest_w is None or self._begun is None:
            return None
        seconds = self.now() - self._begun[0]
        share = sum(FOLLOWS[phase] * units for phase, units in self._phases.items()) / self._units
        clocks = self.held.gpu.supported_mhz()
        watts = max(joules / seconds, self._rest_w)
        return modelled(seconds / self._units, watts, self._rest_w, share, max(clocks))

    def chosen(self, model: ClockModel) -> float | None:
        """The clock that the policy would take by `model`; None: it takes none of its own."""
        return None

    def figures(self) -> list[Figure]:
        """What was set, and what it changed: measured against full clocks where both were measured, else modelled, or None with why."""
        if not self.refused:
            return self._measured()
        try:
            model = self.model()
        except NvmlError:  # a device that does not even list its clocks
            model = None
        mhz = None if model is None else self.chosen(model)
        if model is None or mhz is None:
            note = f"{self.refused}; too little is known to model it"
            return [Figure(name="clock_saving", value=None, unit="fraction", how="modelled", note=note)]
        share = model.compute_s / model.time_s(model.full_mhz)
        note = f"of joules a unit at {mhz:.0f} MHz; {self.refused}; t_cmp is taken as {share:.0%} of the time, P - idle as f^{model.exponent:g}"
        note += ": at most that, since the memory's power is in it and does not follow the clock"
        full = model.full_mhz
        return [
            Figure(name="clock_mhz", value=mhz, unit="MHz", how="modelled", note=f"advised, not set: {self.refused}"),
            Figure(
                name="clock_saving",
                value=1 - model.energy_j(mhz) / model.energy_j(full),
                unit="fraction",
                how="modelled",
                note=note,
            ),
            Figure(
                name="clock_slowdown",
                value=model.time_s(mhz) / model.time_s(full),
                unit="x",
                how="modelled",
                note=note,
            ),
        ]

    def _measured(self) -> list[Figure]:
        now = self.held.now
        found = [Figure(name="clock_mhz", value=now.sm_mhz, unit="MHz", note=f"at the end: {now}")]
        found += [Figure(name="clock_changes", value=self.changes, unit="times", note="settings that were set")]
        full = next((one for one in self.tried if one.setting == FULL), None)
        taken = next((one for one in self.tried if one.setting == now), None)
        if full is not None and taken is not None:
            note = f"of a unit of work under {now}, against full clocks in the same run; {len(self.tried)} settings measured"
            saving, slower = 1 - taken.energy_j / full.energy_j, taken.time_s / full.time_s
            found.append(Figure(name="clock_saving", value=saving, unit="fraction", note=f"joules {note}"))
            found.append(Figure(name="clock_slowdown", value=slower, unit="x", note=f"seconds {note}"))
        return found


def _resting(held: Held) -> float | None:
    """The watts of the GPU now, where nothing runs on it; else None."""
    try:
        return held.gpu.power_w() if held.gpu.throttle() & IDLE else None
    except NvmlError:
        return None
