"""Relational distillation: the distances between a sequence's hidden states are as the teacher's, whatever the two widths are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.train.objectives.hidden_states import Layers

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.context import Context
    from hone.train.objectives.seen import Seen


class Relations(Layers):
    """Huber loss of the distances between the hidden states of a sequence, divided by their mean, added to distill. Park et al. 2019 (RKD-D), arXiv:1904.05068."""

    paper: ClassVar[str] = "arXiv:1904.05068"

    def compared(self, own: Seen, theirs: Seen, valid: Tensor, context: Context) -> Tensor:
        import torch

        both = (valid[:, :, None] & valid[:, None, :]).to(own.hidden.dtype)
        both = both * (1 - torch.eye(valid.shape[1], dtype=both.dtype, device=both.device))
        count = both.sum((1, 2), keepdim=True).clamp(min=1)
        # By differences: as |a|^2 + |b|^2 - 2ab, torch's choice for many rows, close states would lose most of their digits.
        exact = {"compute_mode": "donot_use_mm_for_euclid_dist"}
        mine, wanted = (torch.cdist(one, one, **exact) for one in (own.hidden, theirs.hidden))
        mine, wanted = (
            one * both * count / (one * both).sum((1, 2), keepdim=True).clamp(min=1e-12) for one in (mine, wanted)
        )
        apart = torch.nn.functional.smooth_l1_loss(mine, wanted, reduction="none") * both
        return apart.sum(-1) / both.sum(-1).clamp(min=1)
