"""Allocation by divergence of single matrices and of pairs: errors of two matrices can add up, or cancel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.compress.allocations.base import PairLosses, candidates
from hone.compress.allocations.kl import KLAllocation
from hone.compress.quantizers.base import quantizer_of

if TYPE_CHECKING:
    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.engine.job import Job
    from hone.solvers.pairwise.problem import Pairwise


class PairAllocation(KLAllocation):
    """Bits by the divergences of single matrices and of what every two lose together beyond them. Deng et al. 2023 (CLADO), arXiv:2307.05657."""

    paper: ClassVar[str] = "arXiv:2307.05657"

    solver: Literal["exact", "greedy", "anneal"] = Field(
        "exact",
        description="exact: branch and bound, the best that solver_s finds; greedy: most loss a byte first; anneal: simulated annealing.",
    )
    solver_s: float = Field(
        60.0, gt=0, description="Most seconds of the exact solver, which then says how near it came."
    )
    solver_evaluations: int = Field(100_000, gt=0, description="Losses that annealing computes.")

    most_share: ClassVar[float | None] = None

    def probes(self, num_matrices: int) -> int:
        return self.probe_sequences * num_matrices * (num_matrices + 1) // 2

    def predicted(self, loss: float) -> None:
        """None: how near such a sum comes to the divergence of the whole model was not measured."""
        return

    def pairs(self, losses: dict[str, dict[int, float]], job: Job, flow: Flow, run: Run) -> PairLosses:
        """Measured at `probe_bits`; at other bits scaled by both matrices' errors, to which a product of two errors is proportional."""
        from hone.compress.allocations.probing import probe_pairs

        quantizer = candidates(quantizer_of(job.steps), self.bits)[self.probe_bits]
        together = probe_pairs(job, flow, quantizer, self.probe_sequences, run)
        sizes = {
            name: [math.sqrt(max(values[bits] / max(values[self.probe_bits], 1e-30), 0.0)) for bits in self.bits]
            for name, values in losses.items()
        }
        found = {}
        for (one, other), value in together.items():
            beyond = value - losses[one][self.probe_bits] - losses[other][self.probe_bits]
            found[one, other] = [[beyond * a * b for b in sizes[other]] for a in sizes[one]]
        return found

    def picked(self, problem: Pairwise, run: Run) -> list[int] | None:
        from hone.solvers.pairwise.solvers import anneal, exact, greedy

        if self.solver == "anneal":
            return anneal(problem, self.solver_evaluations)
        searched = greedy(problem)
        if self.solver == "greedy" or searched is None:
            return searched
        best = exact(problem, self.solver_s)
        if best is None or problem.loss(best.choice) > problem.loss(searched):
            run.say(
                f"allocation: {self.solver_s:g} s of the exact solver found nothing better than the greedy choice, which is taken"
            )
            return searched
        if problem.loss(best.choice) - best.bound > 1e-6 * abs(best.bound):
            run.say(
                f"allocation: the loss {problem.loss(best.choice):.4g} is the best found in {self.solver_s:g} s; none is below {best.bound:.4g}"
            )
        return best.choice
