"""What an evaluation during a training says: the loss of the next token and, of pairs, how often and how far the chosen answer wins."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hone.feed.load import IGNORE, Batch
from hone.train.activation_checkpointing import KeepAll
from hone.train.objectives.draft_heads.measure import held_out_heads
from hone.train.objectives.next_token import NextToken
from hone.train.objectives.preference.base import OnePrompt, Preference
from hone.train.passes import Preparer, run_layers, share, to_device
from hone.train.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from hone.feed.load import PackedTokens
    from hone.feed.mix.sources import Joined
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.live.samples import Sampler
    from hone.train.objectives.base import Objective


class Trained(Protocol):
    """What is read of a training."""

    model: Decoder
    teacher: Decoder | None
    objective: Objective
    preparer: Preparer | None
    sampler: Sampler | None
    ranks: Ranks
    device: torch.device
    done: int
    gradient_accumulation_steps: int


def evaluated(
    trainer: Trained,
    val: PackedTokens | Joined,
    val_loss: float,
    *,
    batch_size: int,
    seq_len: int,
    num_sequences: int = 0,
) -> dict[str, Any]:
    """The row of an evaluation: step, val_loss (nats a target), val_bits_per_byte, of pairs what `held_out` says, of draft heads their loss. Every rank calls it."""
    tokens, num_bytes = val.scored
    row = {"step": trainer.done, "val_loss": val_loss}
    if not trainer.objective.scores_text:
        row["val_bits_per_byte"] = val_loss / math.log(2) * tokens / max(num_bytes, 1)
    if (
        trainer.sampler is not None and trainer.ranks.mesh.leads
    ):  # it alone writes the row; the others wait in the next step
        row["samples"] = trainer.sampler.rows(trainer.model, val, seq_len)
    if isinstance(trainer.objective, Preference):
        row |= held_out(trainer, val, batch_size=batch_size, seq_len=seq_len, num_sequences=num_sequences)
    if trainer.objective.trains_heads:
        row |= held_out_heads(trainer, val, batch_size=batch_size, seq_len=seq_len, num_sequences=num_sequences)
    return row


def held_out_loss(
    trainer: Trained,
    val: PackedTokens | Joined,
    *,
    batch_size: int,
    seq_len: int,
    num_sequences: int = 0,
    model: Decoder | None = None,
) -> float:
    """`validate` of the model of `trainer`, or of another `model`; of a reward model, which predicts no tokens, its loss of a pair."""
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_sequences": num_sequences}
    if trainer.objective.scores_text:
        return held_out(trainer, val, **sizes).get("val_preference_loss", math.nan)
    return validate(model or trainer.model, val, **sizes, ranks=trainer.ranks)


def held_out(
    trainer: Trained, val: PackedTokens | Joined, *, batch_size: int, seq_len: int, num_sequences: int = 0
) -> dict[str, float]:
    """What the objective says of the answers in the first `num_sequences` of `val` (0: all): of pairs their number val_pairs, and means over
    them: val_preference_loss, val_accuracy (the share of pairs whose chosen answer has the higher reward) and val_margin (its reward less
    the other's); of labelled answers what `KTO.means` says. A batch, such as a short last one, whose answers have one prompt is left out
    where answers are compared with those to others: val_answers does not count it. Empty where nothing is left."""
    objective, model, teacher = trainer.objective, trainer.model, trainer.teacher
    assert isinstance(objective, Preference), "measured for objectives on pairs alone"
    segments = KeepAll().segments(len(model.layers))
    found, seen = [], 0
    with torch.no_grad(), trainer.ranks.mesh.transfers():
        for batch in val.in_order(batch_size, seq_len):
            if num_sequences:
                batch = Batch(*(array[: num_sequences - seen] for array in batch))
            seen += len(batch.tokens)
            mine = share(batch, *trainer.ranks.data)
            try:
                mine = mine if trainer.preparer is None else trainer.preparer.prepare(trainer, mine)  # type: ignore[assignment]
            except OnePrompt:  # on all ranks
                pass
            else:
                tokens, targets, context = to_device(mine, trainer.device)
                x = run_layers(model, tokens, context, segments)
                taught = teacher.hidden(tokens, context) if teacher is not None and objective.reads_teacher else None
                found.append(objective.measures(model, x, targets, context, teacher, taught).cpu())
            if num_sequences and seen >= num_sequences:
                break
        if not found:
            return {}
        sums = trainer.ranks.mesh.sum(torch.stack(found).sum(0) * trainer.ranks.counts_loss)
    return objective.means(sums.tolist())


def validate(
    model: Decoder,
    data: PackedTokens | Joined,
    *,
    batch_size: int,
    seq_len: int,
    num_sequences: int = 0,
    ranks: Ranks | None = None,
) -> float:
    """Mean next-token loss (nats per valid token) on the first `num_sequences` of `data` in stored order (0: all of them).

    Every data-parallel rank of `ranks` computes a part of each batch, and all get the same loss.
    """
    ranks = ranks or Ranks()
    segments = KeepAll().segments(len(model.layers))
    device = next(model.parameters()).device

    def nats_of(x: Tensor, tokens: Tensor, targets: Tensor, context: Context) -> Tensor:
        return NextToken().total(model, x, targets, None, None)

    nats, count, seen = 0.0, 0, 0
    with torch.no_grad(), ranks.mesh.transfers():
        for batch in data.in_order(batch_size, seq_len):
            if num_sequences:
                batch = Batch(*(array[: num_sequences - seen] for array in batch))
            seen += len(batch.tokens)
            mine = share(batch, *ranks.data)
            mine = mine if ranks.context is None else ranks.context.divide(mine)
            if ranks.pipeline is not None:
                nats += ranks.pipeline.score(model, mine, segments, nats_of)
            else:
                tokens, targets, context = to_device(mine, device, ranks.context)
                nats += nats_of(run_layers(model, tokens, context, segments), tokens, targets, context).item()
            count += int((mine.targets != IGNORE).sum())
            if num_sequences and seen >= num_sequences:
                break
        own = torch.tensor([nats * ranks.counts_loss, count * ranks.counts_tokens], dtype=torch.float64)
        nats, count = ranks.mesh.sum(own).tolist()
    return nats / max(count, 1)
