"""Allocation by output errors: each matrix's relative squared error, weighted by what its block adds to the hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.base.figure import Estimate
from hone.compress.allocations.base import Allocation, candidates
from hone.compress.quantizers.base import quantizer_of

if TYPE_CHECKING:
    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.engine.job import Job

SHARE = 0.95
"""Divergence of the model over the sum of losses: 0.98, 0.97 and 0.92 at 3.125, 2.625 and 4.125 bits (reference-29m, gptq)."""


class HessianAllocation(Allocation):
    """Bits by tr(D H D^T) / tr(W H W^T), D the change of W, times the block's share of the hidden states. Dong et al. 2019, arXiv:1911.03852."""

    paper: ClassVar[str] = "arXiv:1911.03852"
    most_share: ClassVar[float | None] = 0.98

    def predicted(self, loss: float) -> Estimate:
        formula = (
            f"{SHARE} x the sum of losses {loss:.4g}, as gptq on hone's 29 M model at 2.6 to 4.1 bits (within 4 %)"
        )
        return Estimate(value=SHARE * loss, unit="nats/token", formula=formula)

    def losses(self, job: Job, flow: Flow, run: Run) -> dict[str, dict[int, float]]:
        from hone.compress.allocations.sensitivity import measure

        quantizers = candidates(quantizer_of(job.steps), self.bits)
        measured = measure(job, flow, quantizers, run)
        return {one.name: {bits: one.share * error for bits, error in one.errors.items()} for one in measured}
