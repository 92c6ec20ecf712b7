"""`hone cost speculate`: tokens of a step of speculative decoding, and how much faster it is."""

from __future__ import annotations

from pydantic import Field

from hone.cost.calculators.sheet import Calculator, Sheet
from hone.cost.serve.speculation import expected_tokens

PAPER = "Leviathan et al. 2023, arXiv:2211.17192"


class Speculate(Calculator):
    """A draft of K tokens that a model accepts one after the other."""

    acceptance: float = Field(0.7, ge=0, le=1, description="Chance that a drafted token is accepted (alpha).")
    drafted: int = Field(4, ge=0, description="Tokens drafted in a step (K).")
    draft_cost: float = Field(0.05, ge=0, description="Time of drafting a token, of that of the model's step.")

    def sheet(self) -> Sheet:
        """Expected tokens a step, and the speed beside a step a token; verification is free, as where memory is the limit."""
        found = Sheet(f"speculation: {self.drafted} drafted tokens, each accepted with {self.acceptance:.0%}")
        given = {"a": self.acceptance, "K": self.drafted}
        expected = expected_tokens([self.acceptance] * self.drafted)
        if self.acceptance == 1:
            tokens = found.add("tokens of a step", "K + 1", "tokens", PAPER, expected, K=self.drafted)
        else:
            tokens = found.add("tokens of a step", "(1 - a ** (K + 1)) / (1 - a)", "tokens", PAPER, expected, **given)
        found.add("times faster", "E / (c * K + 1)", "", PAPER, E=tokens, c=self.draft_cost, K=self.drafted)
        return found
