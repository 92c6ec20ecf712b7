"""A teacher that is trained already."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.train.teachers.base import Teacher, Tutor

if TYPE_CHECKING:
    from hone.model.decoder import Decoder


class Fixed(Teacher):
    """The model of the input 'teacher', which stays as it is. Hinton et al. 2015, arXiv:1503.02531."""

    paper: ClassVar[str] = "arXiv:1503.02531"
    from_parent: ClassVar[bool] = True

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        assert given is not None, "this objective needs a teacher"
        return Tutor(given)
