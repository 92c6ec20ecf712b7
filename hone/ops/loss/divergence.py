"""How far a student's distribution is from a teacher's: five divergences of a chunk of tokens, with their slopes.

Legend: T tokens, V outcomes; p is the teacher's distribution, q the student's.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl"]


class Divergence(NamedTuple):
    """Which divergence, and its `weight`: beta of jsd, alpha of the skewed ones, unused by the other two.

    forward_kl KL(p || q); reverse_kl KL(q || p); jsd b KL(p || m) + (1 - b) KL(q || m) with m = b p + (1 - b) q (Agarwal et al.
    2023, arXiv:2306.13649); skew_kl KL(p || a p + (1 - a) q) and skew_reverse_kl KL(q || a q + (1 - a) p) (Ko et al. 2024,
    arXiv:2402.03898).
    """

    kind: Kind = "forward_kl"
    weight: float = 0.0


FORWARD_KL = Divergence()


def terms(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(terms, slopes) of log-probabilities [T, V]: the divergence is the sum of the terms over V, and its gradient by the
    logits of q is q (slopes - sum of q slopes)."""
    kind, weight = divergence
    if kind == "forward_kl":
        p = log_p.exp()
        return p * (log_p - log_q), -(log_p - log_q).exp()
    if kind == "reverse_kl":
        apart = log_q - log_p
        return log_q.exp() * apart, apart
    if kind == "jsd":
        log_m = _mixed(log_p, log_q, weight)
        theirs, ours = log_p - log_m, log_q - log_m
        return weight * log_p.exp() * theirs + (1 - weight) * log_q.exp() * ours, (1 - weight) * ours
    if kind == "skew_kl":
        apart = log_p - _mixed(log_p, log_q, weight)
        return log_p.exp() * apart, (weight - 1) * apart.exp()
    apart = log_q - _mixed(log_q, log_p, weight)
    return log_q.exp() * apart, apart - weight * apart.exp()


def _mixed(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """log(weight p + (1 - weight) q)."""
    return torch.logaddexp(log_p + math.log(weight), log_q + math.log1p(-weight))


def apart(divergence: Divergence, log_p: Tensor, log_q: Tensor, *, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    """(divergence [T], where it `wants_grad` its gradient [T, V] by the logits of q) of log-probabilities [T, V]."""
    if divergence.kind == "forward_kl":  # whose slope needs no division
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), log_q.exp().sub_(p) if wants_grad else None
    parts, slopes = terms(divergence, log_p, log_q)
    if not wants_grad:
        return parts.sum(-1), None
    q = log_q.exp()
    return parts.sum(-1), slopes.sub_((q * slopes).sum(-1, keepdim=True)).mul_(q)
