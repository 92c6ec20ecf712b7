"""An engine whose figures have the joules that its devices used since it was opened, where they have a meter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.measure.energy import Meter

GPU_JOULES, PROCESSOR_JOULES = "energy_joules", "processor_joules"
"""Figures of an engine; engines on one machine have GPUs of their own and the same processors."""


class Metered:
    """`engine`, with the joules of `meters`, which are started, among its figures by `name`."""

    def __init__(self, engine: Any, meters: Sequence[Meter], name: str) -> None:
        self._engine, self._meters, self._name = engine, meters, name

    def stats(self) -> dict[str, float]:
        """As the engine's, with joules since the start; without them while a meter cannot be read."""
        found: dict[str, float] = self._engine.stats()
        joules = [meter.joules() for meter in self._meters]
        known = [one for one in joules if one is not None]
        return {**found, self._name: sum(known)} if len(known) == len(joules) else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def metered(engine: Any, device: str, num_ranks: int = 1) -> Any:
    """`engine` with the joules of its `num_ranks` GPUs from `device` on, or of the processor; as it is where one has no meter."""
    kind, _, first = device.partition(":")
    devices = [f"{kind}:{int(first or 0) + rank}" for rank in range(num_ranks)] if kind == "cuda" else [device]
    meters = [Meter(one) for one in devices]
    for meter in meters:
        meter.start()
    if any(meter.joules() is None for meter in meters):
        for meter in meters:
            meter.stop()
        return engine
    return Metered(engine, meters, GPU_JOULES if kind == "cuda" else PROCESSOR_JOULES)
