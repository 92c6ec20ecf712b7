"""Pfeiffer's adapters: a bottleneck behind the feed-forward of every layer, half of Houlsby's."""

from __future__ import annotations

from typing import ClassVar, Literal

from hone.model.adapters.bottlenecks.base import Bottleneck


class Pfeiffer(Bottleneck):
    """y + U f(D (x + y)) of the feed-forward's output y and the stream x before it. Pfeiffer et al. 2020, arXiv:2005.00247."""

    paper: ClassVar[str] = "arXiv:2005.00247"
    reads: ClassVar[Literal["output", "sum", "stream"]] = "sum"
