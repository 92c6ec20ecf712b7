"""What is kept of a teacher's logits: the k most likely ids, or k that are drawn.

Legend: T tokens, V vocabulary, k ids of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING = -60.0
"""Log-probability that stands for none, so that differences of them are finite."""


def most_likely(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [T, k], log-probabilities float32 [T, k], that of all other ids together [T]) of logits [T, V]."""
    log_p = (logits.float() / temperature).log_softmax(-1)
    kept, ids = log_p.topk(k, -1)
    others = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1)
    return ids, kept, others.clamp(min=NOTHING)


def drawn(logits: Tensor, k: int, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(ids int64 [T, k] drawn with replacement, their log-probabilities float32 [T, k]) of logits [T, V].

    The mean of log p - log q over the ids is an unbiased estimate of KL(p || q), and so is its gradient. Anshumann et al. 2025,
    arXiv:2503.16870.
    """
    log_p = (logits.float() / temperature).log_softmax(-1)
    ids = torch.multinomial(log_p.exp(), k, replacement=True, generator=generator)
    return ids, log_p.gather(-1, ids)
