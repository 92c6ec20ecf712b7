"""Drafter: Medusa heads beside the model, each of which guesses one more token from the last hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.serve.speculation.drafter import DraftSetting, Passed
from hone.serve.speculation.hidden import HiddenDrafter, HiddenProposer

if TYPE_CHECKING:
    from hone.model.decoder import Decoder
    from hone.model.drafters.medusa import MedusaHeads


class Medusa(HiddenDrafter):
    """Guess with the most likely token of each Medusa head, verify with the model. Cai et al. 2024, arXiv:2401.10774."""

    paper: ClassVar[str] = "arXiv:2401.10774"

    num_tokens: int = Field(
        3, ge=1, le=16, description="Tokens guessed ahead, one a head; at most as many as there are heads."
    )

    def open(self, setting: DraftSetting) -> tuple[HiddenProposer, MedusaGuesser]:
        return HiddenProposer(), MedusaGuesser(setting.model, setting.heads, self.num_tokens)


class MedusaGuesser:
    """The heads at work: two products a head and step, no cache."""

    cache = None
    taps: tuple[int, ...] = ()

    def __init__(self, model: Decoder, heads: MedusaHeads, num_tokens: int) -> None:
        if num_tokens > len(heads.heads):
            raise SpecError(
                f"engine.drafter.num_tokens is {num_tokens}, and there are {len(heads.heads)} Medusa heads",
                fix=f"set engine.drafter.num_tokens={len(heads.heads)}, or train more heads",
            )
        self._model, self._heads = model, heads.heads[:num_tokens]

    def guess_on(self, passed: Passed) -> list[list[int]]:
        import torch

        rows = torch.from_numpy(passed.rows()).to(passed.x.device)
        h = self._model.head_input(passed.x[rows])
        found: list[list[int]] = torch.stack([head(h).argmax(-1) for head in self._heads], 1).tolist()
        return found
