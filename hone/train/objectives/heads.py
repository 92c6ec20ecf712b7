"""Queries, keys and values of attention layers, as objectives compare them: what a token sees, and relations of tokens.

Legend: B sequences, S tokens, H heads, R relation heads, D width of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.context import Context, is_visible
from hone.model.mixers.attention import Attention
from hone.train.objectives.seen import Heads


def visible(context: Context, seq_len: int, device: torch.device, both: tuple[Heads, Heads]) -> Tensor:
    """bool [1 or B, 1, S, S]: the tokens of its document up to itself that a token (third axis) sees in both layers."""
    line = torch.arange(seq_len, device=device)
    window = min((one.window for one in both if one.window is not None), default=None)
    mask = is_visible(line[:, None], line, window)[None]
    if context.document_ids is not None:
        mask = mask & (context.document_ids[:, :, None] == context.document_ids[:, None, :])
    return mask[:, None]


def resplit(heads: Tensor, count: int) -> Tensor:
    """Heads [B, S, H, D] as `count` heads [B, count, S, H D / count] of the same numbers in their order."""
    return heads.flatten(-2).unflatten(-1, (count, -1)).transpose(1, 2)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T / sqrt(D) of queries [B, S, H, D] and keys [B, S, KV, D], a key head for each group of query heads: [B, H, S, S]."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])


def relations(x: Tensor) -> Tensor:
    """x x^T / sqrt(D) of heads [B, R, S, D]: [B, R, S, S]."""
    return x @ x.transpose(-1, -2) / math.sqrt(x.shape[-1])


def apart(own: Tensor, theirs: Tensor, seen: Tensor) -> Tensor:
    """KL(theirs || own) of the distributions softmax over what is `seen` of scores [B, R, S, S], a mean over heads: [B, S]."""
    log_q, log_p = (one.masked_fill(~seen, -torch.inf).log_softmax(-1) for one in (own, theirs))
    terms = (log_p.exp() * (log_p - log_q)).masked_fill(~seen, 0)
    return terms.sum(-1).mean(1)


def check_heads(config: ModelConfig, layers: list[int], whose: str, kind: str) -> None:
    """Raises SpecError unless the mixers of `layers` have queries, keys and values of heads."""
    for layer in layers:
        mixer = config.layers[layer].mixer
        if not isinstance(mixer, Attention):
            raise SpecError(
                f"objective {kind} compares queries, keys and values, and layer {layer} of the {whose} has mixer '{mixer.kind}', "
                "without its own",
                fix="name layers of attention, or take objective: hidden_states",
            )
