"""MXFP4: 4-bit floats, with a power of two for every 32 columns."""

from __future__ import annotations

from typing import ClassVar

from hone.compress.quantizers.microscaling import Microscaling


class MXFP4(Microscaling):
    """Rounds to 4-bit floats (e2m1) with a power of two as the scale of 32 columns. Rouhani et al. 2023, arXiv:2310.10537."""

    paper: ClassVar[str] = "arXiv:2310.10537"
    bits: ClassVar[int] = 4
    number: ClassVar[str] = "e2m1"
    layout: ClassVar[str] = "mxfp4-pack-quantized"
