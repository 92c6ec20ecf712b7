"""The training loop: a step is forward, backward, norm, update; `fit` repeats it, evaluates, logs and checkpoints.

A step is all in `Trainer.step`. Other rooms train with the same two names: a `Trainer` around a
decoder, and `fit` with packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hone.base.errors import HoneError
from hone.data.load import IGNORE, Batch, Feed, PackedTokens
from hone.data.mix.sources import Joined
from hone.model.context import Causal, Context, Packed
from hone.model.decoder import Decoder
from hone.train.activation_checkpointing import ActivationCheckpointing, KeepAll, Segment
from hone.train.checkpoint import Checkpoints
from hone.train.objectives.base import Objective
from hone.train.objectives.next_token import NextToken
from hone.train.optimizers.adamw import AdamW
from hone.train.optimizers.base import Optimizer
from hone.train.precision import LossScaler, Precision, compute_dtype
from hone.train.schedules.base import Schedule
from hone.train.update import Update
from hone.train.watch import Watch


@dataclass(frozen=True)
class Step:
    """The result of one optimizer step. `loss` is nats per valid token before the update; `tokens` counts inputs so far.

    `extra_loss` is the sum of the layers' own losses (such as a router's load balancing), None without any.
    `skipped` means that fp16 gradients overflowed: the weights are unchanged and `grad_norm` is None.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    extra_loss: float | None = None
    skipped: bool = False

    def row(self) -> dict[str, Any]:
        """As a line of steps.jsonl."""
        row: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens": self.tokens,
        }
        if self.extra_loss is not None:
            row["extra_loss"] = self.extra_loss
        return {**row, "skipped": True} if self.skipped else row


class Sums(NamedTuple):
    """Sums over a step's forward and backward passes, over micro-batches and ranks; means are computed from sums only."""

    loss: Tensor
    """The objective, summed over its valid targets."""
    extra: Tensor | None
    """The layers' own losses, summed over tokens; None without any."""
    squared_norm: Tensor
    """Squared norm of the gradient."""


class Counts(NamedTuple):
    """The divisors of a step's sums."""

    targets: float
    """Valid targets of the objective; at least 1."""
    tokens: float
    """Tokens of the batch."""


class Trainer:
    """A decoder in training: its weights, its optimizer, the loss scale, and the number of `steps` done.

    The model is given in float32 and trained in place; afterwards its parameters have the dtype of `precision` (see
    precision.py). `gradient_accumulation_steps` divides a step's batch into that many micro-batches: less memory, the same result but
    for rounding. `compile` runs every layer through torch.compile. `zeros` are weights that stay zero (see `Weights`).
    """

    def __init__(
        self,
        model: Decoder,
        *,
        steps: int,
        schedule: Schedule,
        optimizer: Optimizer | None = None,
        objective: Objective | None = None,
        activation_checkpointing: ActivationCheckpointing | None = None,
        precision: Precision = "fp32",
        max_grad_norm: float = 1.0,
        gradient_accumulation_steps: int = 1,
        teacher: Decoder | None = None,
        compile: bool = False,
        zeros: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model = model.train()
        self.steps = steps
        self.schedule = schedule
        self.optimizer = optimizer or AdamW()
        self.objective = objective or NextToken()
        self.segments = (activation_checkpointing or KeepAll()).segments(len(model.layers))
        self.max_grad_norm = max_grad_norm
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.teacher = None if teacher is None else teacher.eval().requires_grad_(False)
        assert teacher is not None or not self.objective.from_teacher, "this objective needs a teacher"
        self.update = Update(
            model, self.optimizer, compute_dtype(precision), accumulate=gradient_accumulation_steps > 1, zeros=zeros
        )
        self.scaler = LossScaler(enabled=precision == "fp16")
        self.done = 0
        self.tokens = 0
        self.device = model.embedding.device
        if compile:
            for layer in model.layers:
                layer.compile(dynamic=False)

    def step(self, batch: Batch) -> Step:
        """One optimizer step on `batch`. Raises HoneError when the loss or the gradients are not finite."""
        lr = self.optimizer.lr * self.schedule.share(self.done, self.steps)
        loss, extra, norm = self._means(*self.gradients(batch))
        finite = math.isfinite(norm)
        if not math.isfinite(loss) or not (finite or self.scaler.enabled):
            raise self._diverged(loss, norm, lr)
        if finite:
            shrink = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm else 1.0
            self.update.apply(lr, shrink / self.scaler.scale)
            self.scaler.passed()
        else:
            self.update.weights.drop_grads()
            self.scaler.overflowed()
        self.done += 1
        self.tokens += batch.tokens.size
        return Step(self.done, loss, lr, norm if finite else None, self.tokens, extra, skipped=not finite)

    def gradients(self, batch: Batch) -> tuple[Sums, Counts]:
        """Forward and backward passes over the micro-batches of `batch`: sets each weight's gradient, times the loss scale.

        The gradient is that of the sum over the whole step divided by the whole step's counts, so it does not depend on
        the division into micro-batches, however many targets each has.
        """
        counts = self._counts(batch)
        total, extras = torch.zeros((), device=self.device), None
        for part in _cut(batch, self.gradient_accumulation_steps):
            loss, extra = self._loss(part)
            objective = loss * (self.scaler.scale / counts.targets)
            if extra is not None:
                objective = objective + extra * (self.scaler.scale / counts.tokens)
                extras = extra.detach() if extras is None else extras + extra.detach()
            objective.backward()
            total += loss.detach()
        return Sums(total, extras, self.update.weights.squared_norm()), counts

    def _counts(self, batch: Batch) -> Counts:
        """The counts of a whole step, known before its first backward pass."""
        own = torch.tensor([self.objective.count(batch.targets), batch.tokens.size], dtype=torch.float64)
        targets, tokens = self._over_ranks(own).tolist()
        return Counts(max(targets, 1.0), tokens)

    def _means(self, sums: Sums, counts: Counts) -> tuple[float, float | None, float]:
        """(loss a target, extra loss a token, norm of the gradient) of a step; its one wait for the device."""
        parts = [sums.loss, sums.squared_norm, *([] if sums.extra is None else [sums.extra])]
        whole = self._over_ranks(torch.stack([part.detach().double() for part in parts]))
        loss = whole[0].float() / counts.targets
        extras = whole[2:] / counts.tokens
        mean, norm, *extra = torch.cat([loss.double()[None], whole[1:2].sqrt(), extras]).tolist()
        return mean, extra[0] if extra else None, norm / self.scaler.scale

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """Float64 sums [n] of this rank added up over all ranks: the one place where a step's numbers cross them.

        Training runs on one rank, which has all of them.
        """
        return sums

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The objective summed over one micro-batch, and the layers' own losses, summed over its tokens."""
        tokens, targets, context = to_device(batch, self.device)
        teacher_hidden = None
        if self.teacher is not None and self.objective.from_teacher:
            with torch.no_grad():
                teacher_hidden = self.teacher.hidden(tokens, context)
        x = run_layers(self.model, tokens, context, self.segments)
        loss = self.objective.total(self.model, x, targets, self.teacher, teacher_hidden)
        extra = context.extra_loss  # a mean over the tokens of this pass
        return loss, None if extra is None else extra * tokens.numel()

    def _diverged(self, loss: float, norm: float, lr: float) -> HoneError:
        return HoneError(
            f"training diverged at step {self.done + 1}: loss {loss:g}, gradient norm {norm:g}, learning rate {lr:g}",
            fix=f"lower optimizer.lr (it is {self.optimizer.lr:g}), lengthen schedule.warmup or lower max_grad_norm "
            f"(it is {self.max_grad_norm:g})",
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, numbers) on which the next step depends. The order of the data follows from `done`."""
        tensors = self.update.state()
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors, {"done": self.done, "tokens": self.tokens, "scaler": self.scaler.state()}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Restores the result of `state`; the next step is then the one that would have followed.

        Bit for bit on a CPU with the same number of threads; on a GPU attention's backward pass may add in another order.
        """
        self.update.restore(tensors)
        torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)
        self.done, self.tokens = numbers["done"], numbers["tokens"]
        self.scaler.restore(numbers["scaler"])


def fit(
    trainer: Trainer,
    data: Feed,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    val: PackedTokens | Joined | None = None,
    eval_every: int = 0,
    eval_sequences: int = 0,
    watch: Watch | None = None,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 0,
) -> None:
    """Trains until `trainer.steps` are done, from its current step.

    A step is a batch of `batch_size` sequences of `seq_len` tokens. With `val` the loss on its first `eval_sequences` sequences (0: all) is
    computed every `eval_every` steps and after the last one. `watch` logs every step; `checkpoints` saves the
    whole state every `checkpoint_every` steps, after `watch` has synced its logs.
    """
    while trainer.done < trainer.steps:
        step = trainer.step(data.batch(trainer.done, batch_size, seq_len, seed))
        if watch is not None:
            watch.stepped(step.row())
        last = trainer.done == trainer.steps
        if val is not None and (last or (eval_every and trainer.done % eval_every == 0)):
            loss = validate(trainer.model, val, batch_size=batch_size, seq_len=seq_len, num_sequences=eval_sequences)
            if watch is not None:
                bits = loss / math.log(2) * val.num_tokens / val.num_bytes
                watch.evaluated({"step": trainer.done, "val_loss": loss, "val_bits_per_byte": bits})
        if checkpoints is not None and checkpoint_every and trainer.done % checkpoint_every == 0 and not last:
            if watch is not None:
                watch.sync()
            checkpoints.save(trainer.done, *trainer.state())
            if watch is not None:
                watch.restart_clock()


def validate(
    model: Decoder, data: PackedTokens | Joined, *, batch_size: int, seq_len: int, num_sequences: int = 0
) -> float:
    """Mean next-token loss (nats per valid token) on the first `num_sequences` of `data` in stored order (0: all of them)."""
    segments = KeepAll().segments(len(model.layers))
    nats, count, seen = 0.0, 0, 0
    with torch.no_grad():
        for batch in data.in_order(batch_size, seq_len):
            if num_sequences:
                batch = Batch(*(array[: num_sequences - seen] for array in batch))
            tokens, targets, context = to_device(batch, model.embedding.device)
            x = run_layers(model, tokens, context, segments)
            nats += NextToken().total(model, x, targets, None, None).item()
            count += int((batch.targets != IGNORE).sum())
            seen += len(batch.tokens)
            if num_sequences and seen >= num_sequences:
                break
    return nats / max(count, 1)


def run_layers(model: Decoder, tokens: Tensor, context: Context, segments: tuple[Segment, ...]) -> Tensor:
    """`model.hidden` with recomputed segments: tokens [B, S] -> [B, S, D] before the final norm."""
    x = model.embed(tokens)
    model.prepare(x, context)
    for segment in segments:
        layers = [model.layers[index] for index in range(segment.start, segment.stop)]
        if segment.recompute and torch.is_grad_enabled():
            x = checkpoint(_through, layers, x, context, use_reentrant=False, preserve_rng_state=False)
        else:
            x = _through(layers, x, context)
    return x


def _through(layers: list[Any], x: Tensor, context: Context) -> Tensor:
    for layer in layers:
        x = layer(x, context)
    return x


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Context]:
    """(tokens, targets, context) of a batch; sequences of a single document get the cheaper causal context."""
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    if (batch.document_ids == batch.document_ids[:, :1]).all():
        return tokens, targets, Causal(tokens)
    return tokens, targets, Packed(torch.from_numpy(batch.document_ids).to(device))


def _cut(batch: Batch, parts: int) -> list[Batch]:
    """`batch` in `parts` micro-batches of equal numbers of sequences."""
    size, rest = divmod(len(batch.tokens), parts)
    assert not rest, f"{len(batch.tokens)} sequences cannot be divided into {parts} equal micro-batches"
    return [Batch(*(array[at * size : (at + 1) * size] for array in batch)) for at in range(parts)]
