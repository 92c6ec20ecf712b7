"""Allocation by output errors: each matrix's relative squared error, weighted by what its block adds to the hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.base.lazy import lazy
from hone.compress.allocations.base import Allocation, candidates
from hone.compress.matrix import quantizer_of

if TYPE_CHECKING:
    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.stream import Job

sensitivity = lazy("hone.compress.allocations.sensitivity")


class HessianAllocation(Allocation):
    """Bits by tr(D H D^T) / tr(W H W^T), D the change of W, times the block's share of the hidden states. Dong et al. 2019, arXiv:1911.03852."""

    paper: ClassVar[str] = "arXiv:1911.03852"

    def losses(self, job: Job, flow: Flow, run: Run) -> dict[str, dict[int, float]]:
        quantizers = candidates(quantizer_of(job.steps), self.bits)
        measured = sensitivity.measure(job, flow, quantizers, run)
        return {one.name: {bits: one.share * error for bits, error in one.errors.items()} for one in measured}
