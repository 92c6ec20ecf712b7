"""Offload techniques: what of a training's state leaves the device."""

from __future__ import annotations

from typing import ClassVar

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.cost.facts import ModelFacts
from hone.cost.memory import BUCKET, BYTES
from hone.cost.offload import link_rate
from hone.cost.update import UpdateCost
from hone.measure.machine import Machine

HOST_BYTES_PER_S = 6e9
"""Bytes a second that one thread moves between its core and memory; assumed, not calibrated."""

MOST_BYTES_PER_S = 150e9
"""The same of all threads together."""

COPIES = 16
"""Bytes a weight that an update on the host moves beside the optimizer's own: its gradient arrives, is widened and
scaled, its weight is rounded and leaves."""


class Offload(Technique):
    """Where optimizer state and master weights are."""

    to_host: ClassVar[bool] = False

    def check(self, num_ranks: int) -> None:
        """Raises SpecError where `num_ranks` ranks cannot train so."""

    def update_s(self, facts: ModelFacts, update: UpdateCost, dtype: str, machine: Machine) -> float | None:
        """Seconds of an update that is not computed on the device; None: it is."""
        return None

    def moved_bytes(self, facts: ModelFacts, update: UpdateCost, dtype: str, device: str) -> float:
        """Bytes of the device's memory that this frees; negative where it needs more of it."""
        return 0.0


class Resident(Offload):
    """Optimizer state and float32 master weights are on the device."""


class Host(Offload):
    """Optimizer state and float32 masters are in the host's memory, where the step is computed; gradients come and weights go beside it. Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840."""

    paper: ClassVar[str] = "arXiv:2101.06840"
    to_host: ClassVar[bool] = True

    def check(self, num_ranks: int) -> None:
        """One rank only: several would share the host's cores and memory."""
        if num_ranks > 1:
            raise SpecError(
                f"offload {self.kind} trains on one rank, here are {num_ranks}",
                fix="set offload: none and parallelism.data_parallel: zero1, which divides the optimizer's state",
            )

    def update_s(self, facts: ModelFacts, update: UpdateCost, dtype: str, machine: Machine) -> float | None:
        """The longer of the host's step and the link's copies, which run beside each other."""
        rate = min(HOST_BYTES_PER_S * machine.num_threads, MOST_BYTES_PER_S)
        computed = (update.moved_bytes + COPIES * facts.num_params) / rate
        on_gpu = machine.device.startswith("cuda")
        copied = BYTES[dtype] * facts.num_params / link_rate(machine)[0] if on_gpu else 0.0
        return max(computed, copied)

    def moved_bytes(self, facts: ModelFacts, update: UpdateCost, dtype: str, device: str) -> float:
        """Masters and state of a GPU. A CPU is its own host: it has one more copy of float32 weights, and the buffers."""
        half, params = BYTES[dtype] < 4, facts.num_params
        if device.startswith("cuda"):
            return update.state_bytes + (4 * params if half else 0)
        largest = min(max(BUCKET, facts.vocab_size * facts.hidden_size), params)
        return -float((0 if half else 4 * params) + 4 * BYTES[dtype] * largest)
