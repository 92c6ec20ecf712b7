"""Text that the student or the teacher writes during the training, after prompts from the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.train.texts.base import Text

if TYPE_CHECKING:
    from hone.train.passes import Preparer

writing = lazy("hone.train.texts.writing")


class Sampled(Text):
    """Base of the texts that a model continues."""

    share: float = Field(
        1.0, gt=0, le=1, description="Probability that a step reads such text; the other steps read the data."
    )
    prompt_tokens: int = Field(
        16,
        ge=1,
        description="Tokens of the data that begin each sequence; of conversations all before the first answer, if that is more.",
    )
    sampling_temperature: float = Field(
        1.0, ge=0, description="Temperature at which tokens are drawn; 0: the most likely. The loss has one of its own."
    )
    seed: int = Field(
        0, ge=0, description="Seed of the draws; each depends on it, the step, the sequence and its place."
    )

    def preparer(self) -> Preparer | None:
        return writing.Writing(self)  # type: ignore[no-any-return]

    def turns(self, room: int) -> list[tuple[int, float]]:
        """(tokens, temperature) of the parts in which `room` tokens are written, one after another."""
        return [(room, self.sampling_temperature)]


class StudentText(Sampled):
    """On-policy: the student's own answers, whose mistakes the teacher then corrects. Agarwal et al. 2023 (GKD), arXiv:2306.13649."""

    paper: ClassVar[str] = "arXiv:2306.13649"
    share: float = Field(
        0.5, gt=0, le=1, description="Probability (GKD's lambda) that a step reads such text; the others read the data."
    )

    @property
    def writer(self) -> str:
        return "student"


class TeacherText(Sampled):
    """Data-free: text of the teacher, some tokens the most likely ones, the rest drawn. Liu et al. 2023 (LLM-QAT), arXiv:2305.17888."""

    paper: ClassVar[str] = "arXiv:2305.17888"
    prompt_tokens: int = Field(1, ge=1, description="Tokens of the data that begin each sequence.")
    greedy_tokens: int = Field(
        4, ge=0, description="Tokens after those that are the most likely ones; the paper has 3 to 5."
    )

    @property
    def writer(self) -> str:
        return "teacher"

    def turns(self, room: int) -> list[tuple[int, float]]:
        sure = min(self.greedy_tokens, room)
        return [(count, t) for count, t in ((sure, 0.0), (room - sure, self.sampling_temperature)) if count]
