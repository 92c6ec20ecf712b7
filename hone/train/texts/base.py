"""The base of texts: which tokens a step of a distillation reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.base.table import Technique

if TYPE_CHECKING:
    from hone.feed.load import Batch
    from hone.model.decoder import Decoder


class Text(Technique):
    """The tokens on which a student is compared with its teacher."""

    @property
    def writer(self) -> str:
        """Who writes some of it: 'student', 'teacher', or nobody ('')."""
        return ""

    def batch_of(self, batch: Batch, step: int, rank: int, *, student: Decoder, teacher: Decoder | None) -> Batch:
        """What step `step`, from 0, reads on data-parallel rank `rank` in place of its `batch`: a function of these and the weights."""
        return batch
