"""`hone cost zero`: bytes of weights, gradients and optimizer on each of N ranks, and what they send, for ZeRO 1 to 3."""

from __future__ import annotations

from pydantic import Field

from hone.cost.calculators.sheet import Calculator, Sheet
from hone.cost.ranks import messages_and_bytes

PAPER = "Rajbhandari et al. 2020, arXiv:1910.02054"


class Zero(Calculator):
    """States of a data-parallel training."""

    params: float = Field(7.5e9, gt=0, description="Weights of the model.")
    ranks: int = Field(64, ge=1, description="Data-parallel ranks.")
    weight_bytes: float = Field(2, gt=0, description="Bytes of a weight as computed.")
    gradient_bytes: float = Field(2, gt=0, description="Bytes of a gradient.")
    optimizer_bytes: float = Field(
        12,
        ge=0,
        description="Bytes of the optimizer a weight: 12 of Adam with its float32 weights, 6 of 8-bit Adam with them.",
    )

    def sheet(self) -> Sheet:
        """Bytes a rank without ZeRO and with each of its stages; numbers sent a step."""
        found = Sheet(f"states of {self.params / 1e9:,.4g} billion weights on {self.ranks:,} ranks")
        given = {"psi": self.params, "w": self.weight_bytes, "g": self.gradient_bytes, "k": self.optimizer_bytes}
        n = {"n": self.ranks}
        whole = found.add("DDP: every rank has all", "(w + g + k) * psi", "B", PAPER, **given)
        for stage, formula in {
            "ZeRO-1": "(w + g + k / n) * psi",
            "ZeRO-2": "(w + (g + k) / n) * psi",
            "ZeRO-3": "(w + g + k) / n * psi",
        }.items():
            each = found.add(f"{stage}: bytes a rank", formula, "B", PAPER, **given, **n)
            found.add(f"{stage}: times smaller", "whole / own", "", PAPER, whole=whole, own=each)
        if self.ranks > 1:
            _, moved = messages_and_bytes("all_reduce", "ring", self.ranks, self.params)
            found.add("DDP, ZeRO-1, ZeRO-2: numbers a rank sends in a step", "2 * (n - 1) / n * psi", "", PAPER, moved, psi=self.params, **n)  # fmt: skip
            found.add(
                "ZeRO-3: numbers a rank sends in a step", "3 * (n - 1) / n * psi", "", PAPER, psi=self.params, **n
            )
            found.add("ZeRO-3 sends times more", "3 / 2", "", PAPER)
        return found
