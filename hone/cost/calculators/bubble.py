"""`hone cost bubble`: the part of a step that pipeline ranks wait, for GPipe, 1F1B, interleaved and zero-bubble schedules."""

from __future__ import annotations

from pydantic import Field

from hone.base.errors import SpecError
from hone.cost.calculators.sheet import Calculator, Sheet

GPIPE = "Huang et al. 2019, arXiv:1811.06965"
INTERLEAVED = "Narayanan et al. 2021, arXiv:2104.04473"
ZERO = "Qi et al. 2023, arXiv:2401.10241"


class Bubble(Calculator):
    """Waiting of pipeline ranks."""

    stages: int = Field(8, ge=1, description="Pipeline ranks.")
    microbatches: int = Field(32, ge=1, description="Micro-batches of a step.")
    stages_per_rank: int = Field(2, ge=1, description="Stages of a rank in the interleaved schedule.")
    forward: float = Field(1, gt=0, description="Time of a forward pass of a rank's layers.")
    inputs: float = Field(1, gt=0, description="Time of their gradients of inputs.")
    weights: float = Field(1, gt=0, description="Time of their gradients of weights.")
    layers: int = Field(0, ge=0, description="Layers of the model, for what of them is alive; 0: none.")

    def sheet(self) -> Sheet:
        """Waiting as part of the step and beside the work, and how many micro-batches' activations a rank holds."""
        p, m, v = self.stages, self.microbatches, self.stages_per_rank
        if m < p:
            found_fix = f"give at least --microbatches={p}; the formulas hold from one a rank on"
            raise SpecError(f"microbatches = {m} are fewer than stages = {p}", fix=found_fix)
        found = Sheet(f"bubbles: {p} stages, {m} micro-batches")
        sizes, parts = {"p": p, "m": m}, {"F": self.forward, "B": self.inputs, "W": self.weights}
        work = found.add("work of a rank in a step", "m * (F + B + W)", m=m, **parts)
        found.add("GPipe, 1F1B: beside the work", "(p - 1) / m", "%", GPIPE, **sizes)
        found.add("GPipe, 1F1B: of the step", "(p - 1) / (m + p - 1)", "%", GPIPE, **sizes)
        found.add("interleaved: beside the work", "(p - 1) / (m * v)", "%", INTERLEAVED, v=v, **sizes)
        found.add("interleaved: of the step", "(p - 1) / (m * v + p - 1)", "%", INTERLEAVED, v=v, **sizes)
        for name, formula in {
            "1F1B": "(p - 1) * (F + B + W)",
            "ZB-H1": "(p - 1) * max(F + B - W, 0)",
            "ZB-H2": "(p - 1) * max(F + B - 2 * W, 0)",
        }.items():
            waits = found.add(f"{name}: time of waiting", formula, "", ZERO, p=p, **parts)
            found.add(f"{name}: of the step", "waits / (waits + work)", "%", ZERO, waits=waits, work=work)
        found.add("GPipe: micro-batches alive on a rank", "m", "", GPIPE, m=m)
        found.add("1F1B, ZB-H1: micro-batches alive on the first rank", "p", "", ZERO, p=p)
        found.add("interleaved: micro-batches alive on the first rank", "p * (1 + (p - 1) / (p * v))", "", "Korthikanti et al. 2022, arXiv:2205.05198", p=p, v=v)  # fmt: skip
        found.add("ZB-H2: micro-batches alive on the first rank", "2 * p - 1", "", ZERO, p=p)
        if self.layers:
            root = "Chen et al. 2016, arXiv:1604.06174"
            found.add("sqrt(L) checkpoints: layers alive", "sqrt(L)", "", root, L=self.layers)
        return found
