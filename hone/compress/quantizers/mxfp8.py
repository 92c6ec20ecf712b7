"""MXFP8: 8-bit floats, with a power of two for every 32 columns."""

from __future__ import annotations

from typing import ClassVar

from hone.compress.quantizers.microscaling import Microscaling


class MXFP8(Microscaling):
    """Rounds to 8-bit floats (e4m3) with a power of two as the scale of 32 columns. Rouhani et al. 2023, arXiv:2310.10537."""

    paper: ClassVar[str] = "arXiv:2310.10537"
    bits: ClassVar[int] = 8
    number: ClassVar[str] = "e4m3"
    layout: ClassVar[str] = "mxfp8-quantized"
