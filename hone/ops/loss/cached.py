"""The distillation loss from a few log-probabilities a token that a teacher left on disk, chunk by chunk of tokens.

Legend: T tokens, V vocabulary, D width, k ids of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hone.cost.chunks import default_chunk_tokens
from hone.ops.loss.divergence import FORWARD_KL, Divergence, terms


class Kept(NamedTuple):
    """`ids` int64 [T, k] and their `log_probs` float32 [T, k] of a teacher at `temperature`, over the ids below `vocab_size`.

    With `tails` [T], the log-probability of all other ids together, these are one more outcome; else what is left out counts
    nothing. `drawn`: the ids were drawn from the teacher's distribution, some of them several times. `known` bool [T]: the tokens
    that have them, None: all; the loss of others is their cross entropy.
    """

    ids: Tensor
    log_probs: Tensor
    vocab_size: int
    temperature: float = 1.0
    tails: Tensor | None = None
    drawn: bool = False
    known: Tensor | None = None


def cached_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Kept,
    *,
    alpha: float,
    divergence: Divergence = FORWARD_KL,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """alpha t^2 D(p, softmax(x weight^T / t)) + (1 - alpha) cross entropy, summed over valid targets; a scalar in nats.

    x [T, D] normed hidden states, weight [V, D], targets int64 [T]. p are the log-probabilities of `kept`. Logits of a chunk are
    computed again in the backward pass, so that never all of them are in memory. With ids that were drawn D is KL(p || q) alone.
    """
    assert not kept.drawn or divergence.kind == "forward_kl", "drawn ids estimate the forward KL alone"
    size = default_chunk_tokens(x.device.type, len(weight))
    total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for begin in range(0, len(x), size):
        part = slice(begin, begin + size)
        tails, known = (None if one is None else one[part] for one in (kept.tails, kept.known))
        own = kept._replace(ids=kept.ids[part], log_probs=kept.log_probs[part], tails=tails, known=known)
        given = (x[part], weight, targets[part], own, alpha, divergence, softcap, ignore_index)
        total = total + checkpoint(_of_chunk, *given, use_reentrant=False, preserve_rng_state=False)
    return total


def _of_chunk(
    x: Tensor, weight: Tensor, targets: Tensor, kept: Kept, alpha: float, divergence: Divergence, softcap: float | None,
    ignore_index: int,
) -> Tensor:  # fmt: skip
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid, temperature = targets != ignore_index, kept.temperature
    soft = F.log_softmax(logits[:, : kept.vocab_size] / temperature, -1)
    log_q, log_p = soft.gather(-1, kept.ids), kept.log_probs.to(soft.dtype)
    if kept.drawn:
        apart = (log_p - log_q).mean(-1)
    else:
        if kept.tails is not None:
            others = soft.scatter(-1, kept.ids, -torch.inf).logsumexp(-1, keepdim=True)
            log_q = torch.cat((log_q, others), -1)
            log_p = torch.cat((log_p, kept.tails.to(soft.dtype)[:, None]), -1)
            log_p = log_p.log_softmax(-1)  # float16 on disk: the probabilities add up to one again
        apart = terms(divergence, log_p, log_q)[0].sum(-1)
    text, share = 0.0, alpha if kept.known is None else alpha * kept.known
    if alpha < 1 or kept.known is not None:
        text = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")
    return (share * temperature**2 * apart + (1 - share) * text).masked_fill(~valid, 0).sum()
