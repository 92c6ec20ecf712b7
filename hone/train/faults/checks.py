"""Silent corruption: what is asked for to notice a device that computes wrong numbers without an error."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.base.spec import Spec


class Checks(Spec):
    """Checks of a training's numbers by other ranks' or by a second computation.

    The idea of Megatron-LM's `rerun_state_machine`, which computes a step again to tell a fault of the hardware from one of the
    training (github.com/NVIDIA/Megatron-LM). Large fleets have such devices: Dixit et al. 2021, arXiv:2102.11245.
    """

    rerun_interval: int = Field(
        0,
        ge=0,
        description="Steps between those whose loss and gradients another data-parallel rank computes too (with one: the same rank "
        "again), which doubles their time; 0: none.",
    )
    replicas_interval: int = Field(
        0, ge=0, description="Steps between comparisons of the weights that several ranks hold, bit for bit; 0: none."
    )
    tolerance: float = Field(
        0.0,
        ge=0,
        description="Largest relative difference of a norm that is no mismatch, where a GPU adds in another order each time; "
        "0: bit for bit.",
    )
    on_mismatch: Literal["end", "warn"] = Field(
        "end", description="end: save the state before the step and end; warn: say it and go on."
    )

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self.rerun_interval or self.replicas_interval)
