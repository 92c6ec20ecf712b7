"""Houlsby's adapters: a bottleneck behind attention and another behind the feed-forward of every layer."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from hone.model.adapters.bottlenecks.base import Bottleneck


class Houlsby(Bottleneck):
    """y + U f(D y) of both blocks' outputs y, nearly y at first. Houlsby et al. 2019, arXiv:1902.00751."""

    paper: ClassVar[str] = "arXiv:1902.00751"
    blocks: ClassVar[tuple[str, ...]] = ("mixer", "feed_forward")

    non_linearity: Literal["relu", "swish", "gelu"] = Field("swish", description="Between the two linears.")
