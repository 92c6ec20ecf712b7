"""Allocation by divergence: what the model's predictions lose when one matrix alone is rounded.

The probes are made in `hone.compress.allocations.probing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from hone.base.figure import Estimate
from hone.compress.allocations.base import Allocation, candidates
from hone.compress.quantizers.base import quantizer_of

if TYPE_CHECKING:
    from typing import Self

    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.engine.job import Job

SHARES = (0.55, 0.8)
"""Divergence of the model over the sum of losses: 0.58 and 0.59 at 3.125 and 4.125 bits, 0.77 at 3.9 bits with 16 calibration
sequences (reference-29m, gptq). The losses are of rounding to nearest, of which gptq makes up a part."""


class KLAllocation(Allocation):
    """Bits by the divergence of the predictions that one rounded matrix causes at `probe_bits`, scaled to other bits by its output error."""

    most_share: ClassVar[float | None] = SHARES[1]

    probe_bits: int = Field(3, ge=2, le=8, description="Bits at which each matrix's divergence is measured.")
    probe_sequences: int = Field(4, gt=0, description="Calibration sequences that the divergence is measured on.")

    @model_validator(mode="after")
    def _probe_is_a_candidate(self) -> Self:
        if self.probe_bits not in self.bits:
            raise ValueError(f"probe_bits {self.probe_bits} is none of the candidate bits {list(self.bits)}")
        return self

    def probes(self, num_matrices: int) -> int:
        return self.probe_sequences * num_matrices

    def predicted(self, loss: float) -> Estimate:
        low, high = SHARES
        formula = f"between {low} and {high} x the sum of divergences {loss:.4g}, as gptq on hone's 29 M model"
        return Estimate(value=(low + high) / 2 * loss, unit="nats/token", formula=formula)

    def losses(self, job: Job, flow: Flow, run: Run) -> dict[str, dict[int, float]]:
        """Holds the whole uncompressed model on the device."""
        from hone.compress.allocations.probing import probe
        from hone.compress.allocations.sensitivity import measure

        quantizers = candidates(quantizer_of(job.steps), self.bits)
        measured = {one.name: one.errors for one in measure(job, flow, quantizers, run)}
        probed = probe(job, flow, quantizers[self.probe_bits], self.probe_sequences, run)
        found = {}
        for name, errors in measured.items():
            scale = probed[name] / max(errors[self.probe_bits], 1e-30)
            found[name] = {bits: scale * error for bits, error in errors.items()}
        return found
