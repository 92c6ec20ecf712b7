"""The passes of a micro-batch: its place on a device, the layers with recomputed segments, its division, and what a step gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hone.feed.load import IGNORE, Batch
from hone.model.context import Causal, Context, Packed
from hone.model.decoder import Decoder
from hone.train.activation_checkpointing import Segment
from hone.train.activation_checkpointing.run import run_layers_in
from hone.train.context_parallel.context import ContextRanks
from hone.train.routing.loads import Loads


@dataclass(frozen=True)
class Step:
    """The result of one optimizer step. `loss` is nats per valid token before the update; `tokens` counts inputs so far, without padding.

    `extra_loss` is the sum of the layers' own losses (such as a router's load balancing), None without any.
    `skipped`: the weights are unchanged, because fp16 gradients overflowed, and `grad_norm` is None, or for the reason `why`.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    extra_loss: float | None = None
    skipped: bool = False
    why: str = ""
    loads: Loads | None = None
    """How busy experts were; None without any."""

    def row(self) -> dict[str, Any]:
        """As a line of steps.jsonl."""
        row: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens": self.tokens,
        }
        if self.extra_loss is not None:
            row["extra_loss"] = self.extra_loss if math.isfinite(self.extra_loss) else None
        row |= {} if self.loads is None else self.loads.row()
        row |= {"skipped": True} if self.skipped else {}
        return {**row, "why": self.why} if self.why else row


class Sums(NamedTuple):
    """Sums over a step's forward and backward passes, over micro-batches and ranks; means are computed from sums only."""

    loss: Tensor
    """The objective, summed over its valid targets."""
    extra: Tensor | None
    """The layers' own losses, summed over tokens; None without any."""
    squared_norm: Tensor
    """Squared norm of the gradient."""
    routing: Tensor | None = None
    """What routers counted (`Routing.counts`); None without experts."""


class Counts(NamedTuple):
    """The divisors of a step's sums."""

    targets: float
    """Valid targets of the objective; at least 1."""
    positions: float
    """Positions of the batch, padding included: all are computed."""
    tokens: float
    """Tokens of the batch, without padding: what it trains on."""


class Prepared(NamedTuple):
    """A Batch with what its objective must know before the passes: `values` float32 [B, S, K], of which the context of a pass has its part."""

    tokens: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray
    values: np.ndarray


class Trained(Protocol):
    """What is read of a training, in which a `Preparer` makes passes of its own."""

    model: Decoder
    teacher: Decoder | None
    ranks: Any
    device: torch.device
    done: int
    gradient_accumulation_steps: int


class Preparer(Protocol):
    """Prepares the batches of an objective whose loss depends on more than one micro-batch, such as a mean over a whole step."""

    parts: int | None
    """Micro-batches of the newest batch; None: as many as there would be without it."""
    row: dict[str, float]
    """What the line of a step in steps.jsonl says of it."""

    def prepare(self, trained: Trained, batch: Batch) -> Batch | Prepared:
        """This rank's part of a step's batch with the values that the objective reads. Every rank calls it, without gradients."""

    def state(self) -> dict[str, Tensor]:
        """What a resumed training must have of it, on this rank."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restores `state`."""


class Early(Protocol):
    """Decides on every rank alike whether a training is complete before its last step."""

    def over(self, done: int) -> bool:
        """Whether it is after `done` steps, whatever the loss."""

    def reached(self, done: int, loss: float) -> bool:
        """Whether it is with this validation loss after `done` steps."""


def share(batch: Batch, index: int, parts: int) -> Batch:
    """The sequences of a batch that part `index` has: all have some, because layers may be gathered together."""
    if parts == 1:
        return batch
    mine = type(batch)(*(array[index::parts] for array in batch))
    if len(mine.tokens):
        return mine
    return Batch(batch.tokens[:1], np.full_like(batch.targets[:1], IGNORE), batch.document_ids[:1])


def run_layers(model: Decoder, tokens: Tensor, context: Context, segments: Sequence[Segment]) -> Tensor:
    """`model.hidden` with recomputed segments: tokens [B, S] -> [B, S, D] before the final norm."""
    context.tokens = tokens
    return run_segments(model, model.embed(tokens), context, segments)


def run_segments(model: Decoder, x: Tensor, context: Context, segments: Sequence[Segment]) -> Tensor:
    """x [B, S, D] through the layers of `segments`, of which those to recompute keep their input alone."""
    inner = model.prompted(context)
    model.prepare(x, inner)
    x = run_layers_in(model.layers, x, inner, segments)
    if inner is not context and inner.extra_loss is not None:
        context.add_loss(inner.extra_loss)
    return x


def to_device(
    batch: Batch, device: torch.device, context: ContextRanks | None = None
) -> tuple[Tensor, Tensor, Context]:
    """(tokens, targets, context) of a batch; sequences of a single document get the cheaper causal context.

    With the ranks that share the sequences the batch is a divided one. The context of a prepared batch has its values.
    """
    tokens, targets, found = _placed(batch, device, context)
    if isinstance(batch, Prepared):
        found.values = _moved(batch.values, device)
    return tokens, targets, found


def _placed(batch: Batch, device: torch.device, context: ContextRanks | None) -> tuple[Tensor, Tensor, Context]:
    tokens, targets = (_moved(array, device) for array in (batch.tokens, batch.targets))
    if context is not None:
        return tokens, targets, context.context(batch, device)
    if (batch.document_ids == batch.document_ids[:, :1]).all():
        return tokens, targets, Causal(tokens)
    return tokens, targets, Packed(_moved(batch.document_ids, device))


def _moved(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`. From pinned memory, because a copy from elsewhere waits for all that the GPU has been told to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Told:
    """Numbers of a device on their way to the host, which starts now: a copy that is asked for later waits for all that the device was
    told to do meanwhile, as an update."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def numbers(self) -> list[float]:
        """They, when they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()  # type: ignore[no-any-return]


def cut(batch: Batch, parts: int) -> list[Batch]:
    """`batch` in `parts` micro-batches of equal numbers of sequences."""
    size, rest = divmod(len(batch.tokens), parts)
    assert not rest, f"{len(batch.tokens)} sequences cannot be divided into {parts} equal micro-batches"
    return [type(batch)(*(array[at * size : (at + 1) * size] for array in batch)) for at in range(parts)]


def shrink(norm: Any, most: float) -> Any:
    """What a gradient of `norm` is multiplied with so that its norm is at most `most` (0: any): of a number a number, of a
    float64 scalar a float32 one on its device."""
    if not most:
        return 1.0
    factor = most / (norm + 1e-6)
    return factor.clamp(max=1.0).float() if isinstance(factor, Tensor) else min(1.0, factor)
