"""Drafter: an EAGLE-3 head, which reads the model's hidden states of every token and guesses on from its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.serve.speculation.drafter import DraftSetting
from hone.serve.speculation.hidden import HiddenDrafter, HiddenProposer

if TYPE_CHECKING:
    from hone.serve.speculation.eagle3_runner import Eagle3Guesser


class Eagle3(HiddenDrafter):
    """Guess with an EAGLE-3 head, one token after another, verify with the model. Li et al. 2025, arXiv:2503.01840."""

    paper: ClassVar[str] = "arXiv:2503.01840"

    num_tokens: int = Field(3, ge=1, le=32, description="Tokens guessed ahead, each a pass of the head.")

    def open(self, setting: DraftSetting) -> tuple[HiddenProposer, Eagle3Guesser]:
        from hone.serve.speculation.eagle3_runner import Eagle3Guesser

        return HiddenProposer(), Eagle3Guesser(setting, self.num_tokens, self.max_num_seqs)
