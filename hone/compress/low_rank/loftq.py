"""LoftQ: an adapter with the leading singular vectors of the weight's error, without calibration."""

from __future__ import annotations

from typing import ClassVar

from hone.compress.low_rank.base import Correction


class LoftQ(Correction):
    """Adds the truncated SVD of the error; iterations alternate it with the quantizer. Li et al. 2023, arXiv:2310.08659.

    One iteration is LQER without its scales (arXiv:2402.02446).
    """

    paper: ClassVar[str] = "arXiv:2310.08659"
