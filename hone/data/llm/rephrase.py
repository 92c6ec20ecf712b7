"""Rephrasing by a language model: every document is replaced by the model's version of it."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.data.llm.base import Asking
from hone.data.llm.journal import Answer

pa = lazy("pyarrow")

_THOUGHT = "</think>"


class LLMRephrase(Asking):
    """Replaces documents by a language model's version, for example in the style of an encyclopedia. Maini et al. 2024, arXiv:2401.16380.

    Longer documents than `max_chars` and those without a usable answer keep their text; the column `rephrased` tells which is
    which. All other columns describe the document as it was read.
    """

    paper: ClassVar[str] = "arXiv:2401.16380"
    columns: ClassVar[tuple[str, ...]] = ("rephrased",)
    keep: ClassVar[str] = ""
    reason: ClassVar[str] = ""
    answer_tokens: int = Field(2048, ge=1, description="Most tokens of an answer.")
    max_chars: int = Field(6000, ge=100, description="Longest document, in bytes, that is rephrased.")
    min_share: float = Field(
        0.2, ge=0, description="Least length of an answer as a share of the document's; a shorter one is not used."
    )

    def asks(self, size: int) -> bool:
        return size <= self.max_chars

    def types(self) -> dict[str, Any]:
        """Arrow type of each column."""
        return {"rephrased": pa.bool_()}

    def values_of(self, answer: Answer) -> dict[str, Any] | None:
        """{'text'} of an answer, without reasoning; None when it is refused or empty."""
        text = answer.text.rpartition(_THOUGHT)[2].strip()
        return None if answer.refused or not text else {"text": text}
