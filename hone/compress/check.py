"""The check of a compressed model: its predictions beside the uncompressed model's, on sequences that it was not fitted to.

Both models run layer by layer with the engine, so neither is ever whole in memory. Legend: B sequences, S tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.eval.compare import agreement, divergence
from hone.model.decoder import Decoder, DecoderLayer

HEAD_TOKENS = 512
"""Tokens whose logits are computed at once."""


class Checked(NamedTuple):
    """Means over the scored tokens: divergence in nats with half its 95 % interval, agreement, perplexities."""

    kl: float
    kl_spread: float
    top1: float
    perplexity: float
    dense_perplexity: float
    num_tokens: int


class Check:
    """Hidden states of the check's sequences in the uncompressed and in the compressed model."""

    def __init__(self, samples: Calibration, batch_size: int, device: str, dtype: torch.dtype) -> None:
        self.samples = samples
        self.dense = Flow(samples, batch_size, device, dtype)
        self.compressed = Flow(samples, batch_size, device, dtype)

    def embed(self, dense: Decoder, compressed: Decoder) -> None:
        """Computes the inputs of the first layer of both."""
        self.dense.embed(dense)
        self.compressed.embed(compressed)

    def before(self, layer: DecoderLayer) -> None:
        """Advances the uncompressed model by its layer."""
        self.dense.through(layer)

    def after(self, layer: DecoderLayer) -> None:
        """Advances the compressed model by its layer."""
        self.compressed.through(layer)

    @torch.no_grad()
    def result(self, dense: Decoder, compressed: Decoder) -> Checked:
        """Compares the predictions of every token that has a next one in its document."""
        tokens = torch.from_numpy(self.samples.tokens).to(self.dense.device)
        ids = self.samples.document_ids
        inside = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        if ids is not None:
            owners = torch.from_numpy(ids).to(tokens.device)
            inside = (owners[:, 1:] == owners[:, :-1]) & (owners[:, 1:] >= 0)
        kls, sums, count = [], torch.zeros(3, dtype=torch.float64), 0
        for row in range(len(tokens)):
            kept, total = inside[row], torch.zeros(4, dtype=torch.float64)
            states = zip(
                self.dense.states[row, :-1][kept].split(HEAD_TOKENS),
                self.compressed.states[row, :-1][kept].split(HEAD_TOKENS),
                tokens[row, 1:][kept].split(HEAD_TOKENS),
                strict=True,
            )
            for expected, given, targets in states:
                total += _sums(dense.head(expected).float(), compressed.head(given).float(), targets)
            scored = int(kept.sum())
            if scored:
                kls.append(float(total[0]) / scored)
                sums += total[1:]
                count += scored
        top1, loss, dense_loss = (float(value) / max(count, 1) for value in sums)
        kl = sum(kls) / max(len(kls), 1)
        spread = 0.0
        if len(kls) > 1:
            deviation = math.sqrt(sum((one - kl) ** 2 for one in kls) / (len(kls) - 1))
            spread = 1.96 * deviation / math.sqrt(len(kls))
        return Checked(kl, spread, top1, _exp(loss), _exp(dense_loss), count)


def _sums(expected: Tensor, given: Tensor, targets: Tensor) -> Tensor:
    """Sums over tokens, float64 [4], of logits [T, V]: divergence, agreement, loss, loss of the uncompressed model."""
    loss, dense = (logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0] for logits in (given, expected))
    columns = (divergence(expected, given), agreement(expected, given), loss, dense)
    return torch.stack([column.double().sum() for column in columns]).cpu()


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
