"""Drafter: Medusa heads beside the model, each of which guesses one more token from the last hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.serve.speculation.drafter import DraftSetting, Passed
from hone.serve.speculation.hidden import HiddenDrafter, HiddenProposer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hone.model.decoder import Decoder
    from hone.model.drafters.medusa import MedusaHeads
    from hone.serve.speculation.passes import Verified


class Medusa(HiddenDrafter):
    """Guess with Medusa heads, one token each, verify with the model. Cai et al. 2024, arXiv:2401.10774."""

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
    branches = True

    def __init__(self, model: Decoder, heads: MedusaHeads, num_tokens: int) -> None:
        if num_tokens > len(heads.heads):
            raise SpecError(
                f"engine.drafter.num_tokens is {num_tokens}, and there are {len(heads.heads)} Medusa heads",
                fix=f"set engine.drafter.num_tokens={len(heads.heads)}, or train more heads",
            )
        self._model, self._heads = model, heads.heads[:num_tokens]
        self._first = self._stacked(self._heads)

    def guess_on(self, passed: Passed) -> list[list[int]]:
        import torch

        rows = torch.from_numpy(passed.rows()).to(passed.x.device)
        h = self._model.head_input(passed.x[rows])
        found: list[list[int]] = torch.stack([one.argmax(-1) for one in self._logits(h)], 1).tolist()
        return found

    def read_on(self, passed: Passed) -> None:
        """Nothing: these heads keep nothing of a pass."""

    def guess_in_round(self, verified: Verified) -> Tensor:
        import torch

        logits = self._logits(self._model.head_input(verified.last(verified.x)))
        return verified.draw(torch.cat(logits), 0).view(len(logits), len(logits[0]), -1)

    def _logits(self, h: Tensor) -> list[Tensor]:
        """[S, V] of each head for h [S, D]. Their first blocks are one product where each head has one."""
        import torch.nn.functional as F

        from hone.ops import linear as product

        if self._first is None:
            return [head(h) for head in self._heads]
        hidden = F.silu(product(h, *self._first)).view(len(h), len(self._heads), h.shape[-1]) + h[:, None]
        return [product(one, head[-1].weight) for one, head in zip(hidden.unbind(1), self._heads)]

    @staticmethod
    def _stacked(heads: Sequence[nn.Sequential]) -> tuple[Tensor, Tensor] | None:
        """The weights and biases of the heads' first blocks, one below another, which the heads then share; None for deeper heads."""
        import torch

        if any(len(head) != 2 for head in heads):
            return None
        firsts = [head[0].linear for head in heads]
        weight, bias = torch.cat([one.weight for one in firsts]), torch.cat([one.bias for one in firsts])
        for one, w, b in zip(firsts, weight.chunk(len(heads)), bias.chunk(len(heads))):
            one.weight.data, one.bias.data = w, b
        return weight, bias
