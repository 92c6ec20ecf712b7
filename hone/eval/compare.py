"""Distance of a model's predictions from a reference model's: Kullback-Leibler divergence and top-1 agreement."""

from __future__ import annotations

import torch
from torch import Tensor


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) in nats of each position: logits [..., V] of both -> [...].

    Exactly 0 for equal logits. A tiny negative value from rounding is set to 0. Without gradients: of what is as large as the
    logits, only the reference's log-probabilities and the differences exist beside them.
    """
    with torch.no_grad():
        expected = reference.log_softmax(-1)
        above = logits.log_softmax(-1).sub_(expected).neg_()
        return above.mul_(expected.exp_()).sum(-1).clamp_min(0)


def agreement(reference: Tensor, logits: Tensor) -> Tensor:
    """Whether both have the same most likely token: logits [..., V] of both -> bool [...]. Ties go to the lower id in both."""
    return reference.argmax(-1) == logits.argmax(-1)
