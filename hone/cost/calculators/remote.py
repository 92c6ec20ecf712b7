"""`hone cost remote`: weights that live on memory nodes and are fetched layer by layer: when the link is hidden, and the slowdown."""

from __future__ import annotations

from pydantic import Field

from hone.cost.calculators.kv import bytes_of
from hone.cost.calculators.sheet import Calculator, Sheet


class Remote(Calculator):
    """A pass whose layers' weights come over a link while the layer before computes."""

    dtype: str = Field("bfloat16", description="Number format of the weights.")
    flops_per_s: float = Field(
        720e12, gt=0, description="FLOP/s that the products reach; 720e12 is an H200 in bfloat16."
    )
    link_bytes_per_s: float = Field(63e9, gt=0, description="Bytes/s of the link; 63e9 is PCIe 5 with 16 lanes.")
    tokens: float = Field(2048, gt=0, description="Tokens of a pass: each fetch of a layer serves so many.")

    def sheet(self) -> Sheet:
        """A weight of b bytes travels in b / link seconds and takes 2 FLOP a token: the larger of both decides."""
        b = bytes_of(self.dtype)
        found = Sheet("weights on memory nodes, fetched layer by layer")
        rates = {"peak": self.flops_per_s, "link": self.link_bytes_per_s}
        least = found.add("tokens a fetch from which it is hidden", "b * peak / (2 * link)", b=b, **rates)
        found.add("a pass takes times longer", "max(1, least / tokens)", least=least, tokens=self.tokens)
        found.add("link at which it is hidden", "b * peak / (2 * tokens)", "B", b=b, peak=self.flops_per_s, tokens=self.tokens)  # fmt: skip
        hidden = self.tokens >= least
        found.verdicts.append(
            "the fetches are hidden behind the computation" if hidden
            else "the link is the limit: a pass of more tokens, weights of fewer bytes or a faster link is needed"
        )  # fmt: skip
        return found
