"""What LoRA adapters add to a serving step: the factors of each distinct one are read once, and every linear has a kernel more, or two."""

from __future__ import annotations

from dataclasses import dataclass

from hone.base.figure import Estimate
from hone.cost.roofline import seconds, speed_of_light
from hone.cost.serve.decode import KERNEL_S, STREAMED
from hone.measure.machine import Machine

FEW_ROWS = 64
"""Sequences of a step up to which one kernel of the two is part of the linear's own (`hone.ops.slotted_linear`)."""
SLOT_OPS = 14
"""Operations of one adapter in one linear on a CPU, where plain torch takes its rows out, multiplies twice and puts them back."""


@dataclass(frozen=True)
class AdapterWork:
    """The adapters of a run."""

    distinct: int
    """Adapters that a step mixes at most."""
    slot_bytes: float
    """Bytes of the factors of one."""
    slots: int
    """Slots on the device."""
    linears: int
    """Linears that have factors."""

    @property
    def held_bytes(self) -> float:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def step_seconds(self, machine: Machine, dtype: str, num_seqs: int, *, captured: bool) -> Estimate:
        """Seconds of the products with factors in a step of so many sequences; 0 where none has an adapter."""
        distinct = min(self.distinct, num_seqs)
        read = distinct * self.slot_bytes
        calibration = machine.calibration
        bound = calibration is None or dtype not in calibration.dtypes
        if captured:
            rate = speed_of_light(machine, dtype)[1] if bound else STREAMED * calibration.read_bytes_per_s
            kernels = self.linears * (1 if num_seqs <= FEW_ROWS else 2)
            value = read / rate + (kernels * KERNEL_S if distinct else 0.0)
        else:
            value = seconds(machine, num_bytes=read, num_ops=SLOT_OPS * distinct * self.linears, dtype=dtype).value
        return Estimate(value=value, unit="s", formula=f"{distinct} adapters {value * 1e3:.2f} ms", bound=bound)
