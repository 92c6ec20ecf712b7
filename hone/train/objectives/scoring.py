"""Log-probabilities of a batch's targets under a model, without gradients and some rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hone.feed.load import IGNORE, Batch
from hone.train.objectives.preference.base import token_log_probs
from hone.train.passes import Prepared, to_device

if TYPE_CHECKING:
    from hone.model.decoder import Decoder


@torch.no_grad()
def score(
    model: Decoder, batch: Batch | Prepared, device: torch.device, rows: int, temperature: float = 1.0
) -> np.ndarray:
    """The log-probability of every target of `batch`, float32 [B, S], 0 where there is none; `rows` sequences at once.
    They are those of logits divided by `temperature`.

    Documents are apart, as in training.
    """
    found = np.zeros(batch.targets.shape, np.float32)
    for first in range(0, len(found), max(rows, 1)):
        some = Batch(*(array[first : first + max(rows, 1)] for array in batch[:3]))
        tokens, targets, context = to_device(some, device)
        context.tokens = tokens
        valid = targets != IGNORE
        scores = token_log_probs(model, model.hidden(tokens, context)[valid], targets[valid], temperature)
        found[first : first + len(some.tokens)][some.targets != IGNORE] = scores.float().cpu().numpy()
    return found
