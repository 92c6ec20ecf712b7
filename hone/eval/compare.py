"""How far a model's predictions lie from a reference model's: Kullback-Leibler divergence and first-choice agreement."""

from __future__ import annotations

from torch import Tensor


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model) in nats of each row: logits [..., V] of both -> [...].

    Exactly 0 for equal logits. Rounding could take a tiny divergence below 0; it is cut off there.
    """
    expected = reference.log_softmax(-1)
    return (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1).clamp_min(0)


def agreement(reference: Tensor, logits: Tensor) -> Tensor:
    """Whether both rate the same token highest: logits [..., V] of both -> bool [...]. Ties go to the lower id in both."""
    return reference.argmax(-1) == logits.argmax(-1)
