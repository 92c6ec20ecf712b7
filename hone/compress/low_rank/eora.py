"""EoRA: an adapter that corrects the error of a compressed weight where the calibration inputs see it."""

from __future__ import annotations

from typing import ClassVar

from hone.compress.low_rank.base import Correction


class EoRA(Correction):
    """Adds the factors with the least error of the outputs, in the eigenspace of H. Liu et al. 2024, arXiv:2410.21271.

    With `iterations` the quantizer and the factors alternate, as in CALDERA (arXiv:2405.18886).
    """

    paper: ClassVar[str] = "arXiv:2410.21271"
    needs: ClassVar[frozenset[str]] = frozenset({"hessian"})
