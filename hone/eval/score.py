"""Scores every token of a text with a model: its loss and, with a reference model, divergence and agreement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.base.errors import HoneError
from hone.base.interval import Interval
from hone.eval.compare import agreement, divergence
from hone.eval.windows import LOGITS, Join, ScoredWindow, batches, cut
from hone.model.context import Causal
from hone.model.decoder import Decoder
from hone.model.hf import load


@dataclass(frozen=True)
class Scores:
    """Per token of the text, in its order: `scored` bool [N]; `loss` float32 nats where scored, else 0.

    With a reference: `kl` float32 nats (reference || model), `agree` bool (same most likely token) and `reference_loss` float32.
    """

    scored: np.ndarray
    loss: np.ndarray
    kl: np.ndarray | None = None
    agree: np.ndarray | None = None
    reference_loss: np.ndarray | None = None

    @property
    def num_scored(self) -> int:
        return int(self.scored.sum())

    @property
    def mean_loss(self) -> float:
        """Nats per scored token."""
        return _mean(self.loss, self.scored)

    @property
    def perplexity(self) -> float:
        with np.errstate(over="ignore"):  # infinite above a loss of 709
            return float(np.exp(self.mean_loss))

    @property
    def mean_kl(self) -> float | None:
        """Nats per scored token; None without a reference."""
        return None if self.kl is None else _mean(self.kl, self.scored)

    @property
    def top1_agreement(self) -> float | None:
        """Share of scored tokens with the same most likely token in both models; None without a reference."""
        return None if self.agree is None else _mean(self.agree, self.scored)

    @property
    def mean_difference(self) -> float | None:
        """Nats per scored token by which the loss is above the reference's; None without one."""
        return None if self.reference_loss is None else self.mean_loss - _mean(self.reference_loss, self.scored)

    def intervals(self, starts: np.ndarray) -> dict[str, Interval | None]:
        """The 95 % intervals of `mean_kl` ('kl') and `mean_difference` ('loss'), from their standard deviation over documents.

        Documents begin at `starts`: tokens of one depend on each other. None with fewer than two scored documents.
        """
        assert self.kl is not None and self.reference_loss is not None, "only a comparison has these intervals"
        inside = np.repeat(np.arange(len(starts) - 1), np.diff(starts))[self.scored]
        sizes = np.bincount(inside, minlength=len(starts) - 1)
        above = self.loss.astype(np.float64) - self.reference_loss

        def over_documents(values: np.ndarray) -> Interval | None:
            totals = np.bincount(inside, values[self.scored], minlength=len(sizes))
            return Interval.of_ratio(totals[sizes > 0], sizes[sizes > 0])

        return {"kl": over_documents(self.kl), "loss": over_documents(above)}

    def bits_per_byte(self, token_bytes: np.ndarray) -> float | None:
        """Bits per UTF-8 byte of the text. `token_bytes` int [N]: UTF-8 bytes of each token.

        Tokens without text (end of text) add bits and no bytes. None when there are no bytes.
        """
        total = float(token_bytes[self.scored].sum())
        return float(self.loss[self.scored].sum(dtype=np.float64)) / np.log(2) / total if total else None


def loaded(folder: Path, device: str, dtype: str) -> Decoder:
    """The model in `folder` as it is scored: weights in `dtype`, as torch names it."""
    return load(folder, device=device, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def score(
    decoder: Decoder,
    tokens: np.ndarray,
    starts: np.ndarray | None = None,
    *,
    window: int,
    stride: int | None = None,
    join: Join = "documents",
    batch_tokens: int = 4096,
    reference: Decoder | None = None,
    watch: Callable[[int], Any] | None = None,
) -> Scores:
    """Scores `tokens` (int [N]; documents begin at `starts`, default: one document) in windows, see `windows.cut`.

    Logits are converted to float32 from any dtype. `watch` is called with the tokens of each finished batch.
    Raises HoneError when a loss or a divergence is NaN or infinite.
    """
    starts = np.array([0, len(tokens)]) if starts is None else starts
    device = decoder.device
    num_tokens = len(tokens)
    scored, loss = np.zeros(num_tokens, bool), np.zeros(num_tokens, np.float32)
    kl = None if reference is None else np.zeros(num_tokens, np.float32)
    agree = None if reference is None else np.zeros(num_tokens, bool)
    reference_loss = None if reference is None else np.zeros(num_tokens, np.float32)
    for group in batches(cut(starts, window, stride, join), batch_tokens):
        inputs, targets, kept, where = _stack(tokens, group)
        inputs = inputs.to(device)
        context = Causal(inputs)
        kept = kept.to(device)
        hidden = decoder.hidden(inputs, context)[kept]
        theirs = None if reference is None else reference.hidden(inputs, context)[kept]
        targets = targets.to(device)
        size = max(LOGITS // decoder.config.vocab_size, 1)
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            logits = decoder.head(hidden[part]).float()
            loss[where[part]] = _loss(logits, targets[part]).cpu().numpy()
            if reference is not None:
                expected = reference.head(theirs[part]).float()
                kl[where[part]] = divergence(expected, logits).cpu().numpy()
                agree[where[part]] = agreement(expected, logits).cpu().numpy()
                reference_loss[where[part]] = _loss(expected, targets[part]).cpu().numpy()
        scored[where] = True
        if watch is not None:
            watch(sum(window.stop - window.start for window in group))
    for name, values in (("loss", loss), ("divergence from the reference", kl)):
        if values is not None and not np.isfinite(values).all():
            raise _not_finite(name, values, int(scored.sum()), decoder.dtype)
    return Scores(scored, loss, kl, agree, reference_loss)


def _not_finite(name: str, values: np.ndarray, num_scored: int, dtype: torch.dtype) -> HoneError:
    kind = str(dtype).removeprefix("torch.")
    return HoneError(
        f"the model's {name} is not finite at {int((~np.isfinite(values)).sum())} of {num_scored} tokens in {kind}",
        fix="the model's weights or what it computes from them overflow: "
        + ("make it again" if dtype == torch.float32 else "score it in float32, or make it again"),
    )


def _stack(tokens: np.ndarray, group: list[ScoredWindow]) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """Inputs int64 [B, S] padded at the end, and for the scored predictions: targets, mask over [B, S], token indices."""
    longest = max(window.stop - window.start for window in group)
    inputs = np.zeros((len(group), longest), np.int64)
    kept = np.zeros((len(group), longest), bool)
    for row, window in enumerate(group):
        # A causal model does not attend to later tokens, so padding at the end changes nothing before it.
        inputs[row, : window.stop - window.start] = tokens[window.start : window.stop]
        kept[row, window.first - window.start - 1 : window.stop - window.start] = True
    where = np.concatenate([np.arange(window.first, window.stop + 1) for window in group])
    targets = torch.from_numpy(np.asarray(tokens[where], np.int64))
    return torch.from_numpy(inputs), targets, torch.from_numpy(kept), where


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]


def _mean(values: np.ndarray, scored: np.ndarray) -> float:
    return float(values[scored].mean(dtype=np.float64)) if scored.any() else float("nan")
