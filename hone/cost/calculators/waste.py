"""`hone cost waste`: memory of a cache that no token uses: reserved to the longest length, or by pages."""

from __future__ import annotations

from pydantic import Field

from hone.base.errors import SpecError
from hone.cost.calculators.sheet import Calculator, Sheet

PAPER = "Kwon et al. 2023, arXiv:2309.06180"


class Waste(Calculator):
    """Unused memory of a cache, and of padded batches."""

    mean_tokens: float = Field(800, gt=0, description="Mean tokens of a sequence in the cache.")
    max_tokens: int = Field(2048, ge=1, description="Tokens that a sequence may have.")
    page_size: int = Field(16, ge=1, description="Tokens of a page.")
    shared_tokens: float = Field(0, ge=0, description="Of the mean, those that all sequences begin with.")
    sequences: int = Field(1, ge=1, description="Sequences at once.")

    def sheet(self) -> Sheet:
        """Waste of a reservation, of pages (half of the last one, on average), and what a shared prefix saves."""
        if not self.shared_tokens <= self.mean_tokens <= self.max_tokens:
            raise SpecError(
                f"shared_tokens {self.shared_tokens:g}, mean_tokens {self.mean_tokens:g} and max_tokens {self.max_tokens} do not go together",
                fix="each is at most the next",
            )
        found = Sheet("memory of the cache that no token uses")
        sizes = {"mean": self.mean_tokens}
        found.add("reserved to the longest: waste", "1 - mean / most", "%", PAPER, most=self.max_tokens, **sizes)
        found.add("by pages: tokens of a sequence unused", "(page - 1) / 2", "tokens", PAPER, page=self.page_size)
        found.add(
            "by pages: waste", "(page - 1) / 2 / (mean + (page - 1) / 2)", "%", PAPER, page=self.page_size, **sizes
        )
        found.add("sequences in the same memory, times more", "most / (mean + (page - 1) / 2)", "", PAPER, most=self.max_tokens, page=self.page_size, **sizes)  # fmt: skip
        if self.shared_tokens and self.sequences > 1:
            found.add("shared prefix saves", "(n - 1) * shared / (n * mean)", "%", PAPER, n=self.sequences, shared=self.shared_tokens, **sizes)  # fmt: skip
        return found
