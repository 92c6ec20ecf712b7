"""The base of texts: which tokens a step of a distillation reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.base.table import Technique

if TYPE_CHECKING:
    from hone.train.passes import Preparer


class Text(Technique):
    """The tokens on which a student is compared with its teacher."""

    @property
    def writer(self) -> str:
        """Who writes some of it: 'student', 'teacher', or nobody ('')."""
        return ""

    def preparer(self) -> Preparer | None:
        """What writes it in place of a batch of the data; None: the data are read as they are."""
        return None
