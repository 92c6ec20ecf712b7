"""Next-token objective: cross entropy of each token given the previous ones, without materialising all logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.train.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.decoder import Decoder


class NextToken(Objective):
    """Cross entropy of the next token."""

    def total(
        self, model: Decoder, x: Tensor, targets: Tensor, teacher: Decoder | None, teacher_hidden: Tensor | None
    ) -> Tensor:
        """Nats summed over the valid targets."""
        from hone.ops import linear_cross_entropy

        softcap = model.config.logits_softcap
        divided = getattr(model, "vocabulary", None)  # (axis, first row) of a tensor-parallel decoder
        if divided is not None:
            from hone.parallel.vocabulary import vocabulary_cross_entropy

            h = model.head_input(x).flatten(0, -2)
            return vocabulary_cross_entropy(h, model.head_weight, targets.flatten(), *divided, softcap=softcap)
        return linear_cross_entropy(model.head_input(x), model.head_weight, targets, reduction="sum", softcap=softcap)
