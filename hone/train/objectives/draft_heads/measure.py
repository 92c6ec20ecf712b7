"""What an evaluation says of draft heads: the loss of their objective, since the frozen model's own never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hone.feed.load import Batch
from hone.train.activation_checkpointing import KeepAll
from hone.train.objectives.taps import tap, total
from hone.train.passes import run_layers, to_device

if TYPE_CHECKING:
    from hone.feed.load import PackedTokens
    from hone.feed.mix.sources import Joined


def held_out_heads(
    trainer: Any, val: PackedTokens | Joined, *, batch_size: int, seq_len: int, num_sequences: int = 0
) -> dict[str, float]:
    """val_heads_loss on the first `num_sequences` of `val` (0: all): the objective over the valid targets, in nats a token, as in training."""
    objective, model = trainer.objective, trainer.model
    segments, loss, count, seen = KeepAll().segments(len(model.layers)), 0.0, 0, 0
    with torch.no_grad():
        for batch in val.in_order(batch_size, seq_len):
            if num_sequences:
                batch = Batch(*(array[: num_sequences - seen] for array in batch))
            seen += len(batch.tokens)
            tokens, targets, context = to_device(batch, trainer.device)
            tap(objective, model, None, context)
            x = run_layers(model, tokens, context, segments)
            loss += float(total(objective, model, None, x, tokens, targets, context))
            count += objective.count_in(batch)
            if num_sequences and seen >= num_sequences:
                break
    return {"val_heads_loss": loss / max(count, 1)}
