"""SVD: the nearest product of two thin factors in place of each weight, without calibration."""

from __future__ import annotations

from typing import ClassVar

from hone.compress.low_rank.base import Factorization


class SVD(Factorization):
    """Stores the truncated SVD of each weight, which has the least |W - B A|. Eckart and Young 1936, doi:10.1007/BF02288367."""

    paper: ClassVar[str] = "doi:10.1007/BF02288367"
