"""The context of a pass over parts of sequences, and the division of a batch among the ranks that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.feed.load import Batch
from hone.model.context import Context
from hone.parallel.axis import Axis
from hone.parallel.context.layout import Layout
from hone.train.context_parallel.base import ContextParallel


class AcrossRanks(Context):
    """This rank's part of `batch_size` sequences that the ranks of `axis` hold together, as `layout` says."""

    def __init__(self, layout: Layout, axis: Axis, batch_size: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layout, self.axis, self._attention = layout, axis, attention
        self.positions = layout.positions.expand(batch_size, -1)
        self.rope_len = layout.seq_len

    @torch.compiler.disable
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        k, v = self.keys_and_values(layer, k, v)
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        return self._attention(q, k, v, self.layout, self.axis, **options)

    def _distinct_positions(self) -> Tensor:
        return self.layout.places if self.layout.begins is None else self.layout.positions


class ContextRanks(NamedTuple):
    """The ranks that share each sequence, and how they attend to it."""

    technique: ContextParallel
    axis: Axis

    def divide(self, batch: Batch) -> Batch:
        """`batch` of whole sequences with the tokens and targets of this rank alone: [B, S / n]; document ids stay whole."""
        places = self._layout(batch.tokens.shape[1]).places.numpy()
        return Batch(batch.tokens[:, places], batch.targets[:, places], batch.document_ids)

    def context(self, batch: Batch, device: torch.device) -> AcrossRanks:
        """The context of a divided batch."""
        ids: Any = batch.document_ids
        whole = bool((ids == ids[:, :1]).all())
        layout = self._layout(ids.shape[1], None if whole else torch.from_numpy(ids).to(device), device)
        return AcrossRanks(layout, self.axis, len(ids), self.technique.attention())

    def _layout(self, seq_len: int, document_ids: Tensor | None = None, device: torch.device | str = "cpu") -> Layout:
        zigzag = self.technique.zigzag
        return Layout(seq_len, self.axis.size, self.axis.index, zigzag=zigzag, document_ids=document_ids, device=device)
