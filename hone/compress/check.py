"""The check of a compressed model: its predictions beside the uncompressed model's, on sequences that it was not fitted to.

Both models run layer by layer with the engine, so neither is ever whole in memory. Legend: B sequences, S tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.base.durable import write_atomic
from hone.base.interval import Interval
from hone.base.ranks import Mesh
from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.eval.compare import agreement, divergence
from hone.model.decoder import Decoder
from hone.model.weights.model import ModelSource

HEAD_TOKENS = 512
"""Tokens whose logits are computed at once."""

FILE = "check.json"


class Checked(NamedTuple):
    """Means over the scored tokens: divergence in nats with its 95 % interval over sequences, agreement, perplexities."""

    kl: float
    kl_interval: dict[str, Any] | None
    top1: float
    perplexity: float
    dense_perplexity: float
    num_tokens: int


class Check:
    """Hidden states of the check's sequences in both models: `flow.dense_states` and `flow.states`; each rank has a share."""

    def __init__(
        self, samples: Calibration, batch_size: int, device: str, dtype: torch.dtype, mesh: Mesh | None = None
    ) -> None:
        self.flow = Flow(samples, batch_size, device, dtype, paired=True, mesh=mesh)

    def keep(self, dense: Decoder, compressed: Decoder, state: Path) -> None:
        """Compares the predictions after the last layer, by the heads of both models, and keeps the result in `state`."""
        checked = self.compare(dense, compressed)
        if self.flow.mesh.leads:
            write_atomic(state / FILE, json.dumps(checked._asdict()).encode())

    def compare_models(self, dense: ModelSource, compressed: ModelSource, state: Path) -> None:
        """Runs both models, whose layers may have any sizes, one layer in memory at a time, and keeps the comparison in `state`."""
        flow = self.flow
        ends = [one.build_ends(flow.device, flow.dtype) for one in (dense, compressed)]
        flow.embed(ends[1])
        flow.embed_dense(ends[0])
        for source, through in ((dense, flow.dense_through), (compressed, flow.through)):
            for index in range(source.config.num_layers):
                through(source.reopened().build_layer(index, flow.device, flow.dtype))
        self.keep(*ends, state)

    @torch.no_grad()
    def compare(self, dense: Decoder, compressed: Decoder) -> Checked:
        """The predictions of every token that has a next one in its document, by the heads of both models."""
        tokens = torch.from_numpy(self.flow.own.tokens).to(self.flow.device)
        ids, inside = self.flow.own.document_ids, torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        if ids is not None:
            owners = torch.from_numpy(ids).to(tokens.device)
            inside = (owners[:, 1:] == owners[:, :-1]) & (owners[:, 1:] >= 0)
        assert self.flow.dense_states is not None
        rows = []
        for row, kept in enumerate(inside):
            total = torch.zeros(4, dtype=torch.float64)
            pieces = (self.flow.dense_states[row, :-1], self.flow.states[row, :-1], tokens[row, 1:])
            for expected, given, targets in zip(*(one[kept].split(HEAD_TOKENS) for one in pieces), strict=True):
                total += _sums(dense.head(expected).float(), compressed.head(given).float(), targets)
            rows.append([*total.tolist(), int(kept.sum())])
        rows = [row for part in self.flow.mesh.gather(rows) for row in part]
        *sums, count = (math.fsum(column) for column in zip(*rows, strict=True))
        scored = [row for row in rows if row[-1]]
        interval = Interval.of_ratio([row[0] for row in scored], [row[-1] for row in scored])
        kl, top1, loss, dense_loss = (float(value) / max(count, 1) for value in sums)
        return Checked(kl, interval and interval.model_dump(), top1, _exp(loss), _exp(dense_loss), int(count))


def read(state: Path) -> Checked | None:
    """The result that `Check.keep` wrote; None before."""
    path = state / FILE
    return Checked(**json.loads(path.read_text(encoding="utf8"))) if path.exists() else None


def _sums(expected: Tensor, given: Tensor, targets: Tensor) -> Tensor:
    """Sums over tokens, float64 [4], of logits [T, V]: divergence, agreement, loss, loss of the uncompressed model."""
    loss, dense = (logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0] for logits in (given, expected))
    columns = (divergence(expected, given), agreement(expected, given), loss, dense)
    return torch.stack([column.double().sum() for column in columns]).cpu()


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
