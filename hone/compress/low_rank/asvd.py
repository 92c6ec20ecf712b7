"""Activation-aware SVD: the product of two thin factors with the least error of the outputs on the calibration inputs.

ASVD (arXiv:2312.05821) scales columns by the size of their inputs before the SVD; SVD-LLM multiplies by a root of H, with
which the truncated SVD has the least tr((W - B A) H (W - B A)^T) of all factors. This is the latter.
"""

from __future__ import annotations

from typing import ClassVar

from hone.compress.low_rank.base import Factorization


class ASVD(Factorization):
    """Stores the factors of each weight with the least error of its outputs, by whitened inputs. Wang et al. 2024, arXiv:2403.07378."""

    paper: ClassVar[str] = "arXiv:2403.07378"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian"})
