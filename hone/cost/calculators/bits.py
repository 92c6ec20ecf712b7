"""`hone cost bits`: bytes of weights at some bits, with the scales of their groups, and how much smaller they are."""

from __future__ import annotations

from pydantic import Field

from hone.cost.calculators.model import Sized
from hone.cost.calculators.sheet import Sheet


class Bits(Sized):
    """Weights in fewer bits."""

    bits: float = Field(4, gt=0, le=64, description="Bits of a code.")
    group_size: int = Field(
        0, ge=0, description="Weights that share a scale; 0: a scale of each row, which is nothing."
    )
    scale_bits: float = Field(16, ge=0, description="Bits of a scale.")
    zero_bits: float = Field(0, ge=0, description="Bits of a zero point.")
    from_bits: float = Field(32, gt=0, description="Bits of a weight before.")

    def sheet(self) -> Sheet:
        """Bits of a weight with its part of a scale; bytes of the model; times smaller."""
        found = Sheet(f"weights of {self.bits:g} bits")
        if self.group_size:
            each = found.add("bits of a weight", "b + (scale + zero) / g", "bits", b=self.bits, scale=self.scale_bits, zero=self.zero_bits, g=self.group_size)  # fmt: skip
        else:
            each = found.add("bits of a weight", "b", "bits", b=self.bits)
        found.add(f"times smaller than {self.from_bits:g} bits", "before / own", before=self.from_bits, own=each)
        if self.params or self.model or self.layers:
            at = self.sized(*(() if self.params else ("layers", "hidden_size", "heads", "vocab_size")))
            size = at.params or at.dims().num_params
            found.add("bytes of all weights", "N * bits / 8", "B", N=size, bits=each)
        return found
