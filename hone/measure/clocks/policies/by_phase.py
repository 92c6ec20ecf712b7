"""By phase: decoding gets a low clock, prompts and training get the full one, or a power limit."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hone.measure.clocks.fit import ClockModel
from hone.measure.clocks.held import FULL, Held, Setting
from hone.measure.clocks.policies.base import Clock, Governor, Phase


class ByPhase(Clock):
    """Locks a low clock while nothing but decoding goes on, and gives it back for prompts. Kakolyris et al. 2024 (throttLL'eM), arXiv:2408.05235; phases as in DynamoLLM, arXiv:2408.00741."""

    paper: ClassVar[str] = "arXiv:2408.05235"
    decode_share: float = Field(0.6, gt=0, le=1, description="Clock while decoding, as a share of the highest.")
    decode_mhz: int | None = Field(None, gt=0, description="Clock while decoding, instead of a share.")
    power_limit_w: float | None = Field(None, gt=0, description="Power limit of prompts and training; empty: as it is.")
    hold_s: float = Field(
        1.0, ge=0, description="Seconds without a prompt until the clock is lowered; it is raised at once."
    )

    def begin(self, held: Held, **more: Any) -> Governor:
        return PhaseGovernor(self, held, **more)


class PhaseGovernor(Governor):
    """Follows the phase of the work."""

    def __init__(self, spec: ByPhase, held: Held, **more: Any) -> None:
        super().__init__(held, **more)
        self._full = Setting(limit_w=spec.power_limit_w) if spec.power_limit_w else FULL
        self._hold_s = spec.hold_s
        self._mhz = spec.decode_mhz or self._share(spec.decode_share)
        self._low = self._full._replace(sm_mhz=self._mhz)
        self._prompt_at = self.now()
        self.set(self._full)

    def _share(self, share: float) -> int:
        clocks = self.held.gpu.supported_mhz()
        return min(clocks, key=lambda mhz: abs(mhz - share * max(clocks)))

    def decide(self, units: float, phase: Phase) -> None:
        now = self.now()
        if phase != "decode":
            self._prompt_at = now
            self.set(self._full)
        elif now - self._prompt_at >= self._hold_s:
            self.set(self._low)

    def chosen(self, model: ClockModel) -> float | None:
        return self._mhz
