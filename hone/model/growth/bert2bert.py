"""bert2BERT's advanced knowledge initialization: width by copies whose rows are those of the next layer."""

from __future__ import annotations

from typing import ClassVar

from hone.model.growth.width import Width


class Bert2BERT(Width):
    """Widens by the next layer's rows (AKI): not exact, but its copies are none. Chen et al. 2021, arXiv:2110.07143.

    The paper's FPI, which is exact, is `net2net` with `shares: even`. The next layer is the nearest later one of the same sizes;
    a layer without one copies its own rows.
    """

    paper: ClassVar[str] = "arXiv:2110.07143"
    from_next: ClassVar[bool] = True

    @property
    def exact(self) -> bool:
        return False
