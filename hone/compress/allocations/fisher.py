"""Allocation by the curvature of the loss: output errors of a matrix, each row's weighted by the squared gradient of its output.

The gradients are measured in `hone.compress.allocations.energies`. Legend: H mean of x x^T, D change of a matrix's weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.allocations.base import Allocation, candidates
from hone.compress.quantizers.base import quantizer_of

if TYPE_CHECKING:
    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.engine.job import Job


class FisherAllocation(Allocation):
    """Bits by 1/2 sum_i E[g_i^2] (D H D^T)_ii, g the gradients of the outputs for tokens that the model itself draws: the divergence of its predictions, by the Kronecker-factored Fisher matrix of Martens and Grosse 2015, arXiv:1503.05671."""

    paper: ClassVar[str] = "arXiv:1503.05671"

    gradient_sequences: int = Field(8, gt=0, description="Calibration sequences that the gradients are measured on.")

    @property
    def differentiated(self) -> int:
        return self.gradient_sequences

    def losses(self, job: Job, flow: Flow, run: Run) -> dict[str, dict[int, float]]:
        """Holds the whole uncompressed model on the device, with what its backward pass keeps of one sequence."""
        from hone.compress.allocations import energies
        from hone.compress.allocations.sensitivity import measure

        quantizers = candidates(quantizer_of(job.steps), self.bits)
        rows = energies.of_outputs(job, flow, self.gradient_sequences, run)
        measured = measure(job, flow, quantizers, run, rows)
        return {one.name: {bits: 0.5 * error for bits, error in one.errors.items()} for one in measured}
