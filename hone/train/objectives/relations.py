"""Relational distillation: the distances between a sequence's hidden states are as the teacher's, whatever the two widths are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.train.objectives.hidden_states import Layers

if TYPE_CHECKING:
    from torch import Tensor


class Relations(Layers):
    """Huber loss of the distances between the hidden states of a sequence, divided by their mean, added to distill. Park et al. 2019 (RKD-D), arXiv:1904.05068."""

    paper: ClassVar[str] = "arXiv:1904.05068"

    def compared(self, own: Tensor, theirs: Tensor, valid: Tensor) -> Tensor:
        import torch

        both = (valid[:, :, None] & valid[:, None, :]).to(own.dtype)
        both = both * (1 - torch.eye(valid.shape[1], dtype=own.dtype, device=own.device))
        count = both.sum((1, 2), keepdim=True).clamp(min=1)
        mine, wanted = (torch.cdist(one, one) for one in (own, theirs))
        mine, wanted = (
            one * both * count / (one * both).sum((1, 2), keepdim=True).clamp(min=1e-12) for one in (mine, wanted)
        )
        apart = torch.nn.functional.smooth_l1_loss(mine, wanted, reduction="none") * both
        return apart.sum(-1) / both.sum(-1).clamp(min=1)
