"""What of a machine the choice of a backend depends on, and what a choice is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Where:
    """What of a machine backends depend on: device type, compute capability, multiprocessors, Triton version.

    `triton` is (0, 0) where Triton is not installed. `cpu` is the instruction set of a CPU that there are compiled kernels
    for (`hone.ops.cpu.isa.ISAS`), '' for none.
    """

    kind: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    triton: tuple[int, int] = (0, 0)
    cpu: str = ""

    @property
    def runs_triton(self) -> bool:
        """Whether this is a GPU with tensor cores that Triton supports, and Triton is new enough."""
        # torch 2.11 can trace tuples' < but not their >=.
        return self.kind == "cuda" and not self.capability < (8, 0) and not self.triton < (3, 6)

    @property
    def runs_gluon(self) -> bool:
        """Whether this is exactly sm_90: the Gluon kernels use Hopper's instructions (wgmma, the tensor memory accelerator)."""
        return self.runs_triton and self.capability == (9, 0)


class Choice(NamedTuple):
    """A backend and why it was chosen."""

    backend: str
    reason: str
