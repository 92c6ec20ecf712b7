"""An embedding of which some rows are trained: named tokens, in place of the whole matrix.

Legend: V vocabulary, D width, n trained rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.ops import linear


class TokenRows(nn.Module):
    """The embedding `inner` with `rows` [n, D] in place of those of the tokens `ids`; where embeddings are tied the head reads them, too."""

    def __init__(self, inner: nn.Module, ids: tuple[int, ...], vocab_size: int, width: int) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.rows = nn.Parameter(torch.empty(len(ids), width))
        self.ids = ids

    @property
    def weight(self) -> Tensor:
        """The whole matrix [V, D]: a copy, through which gradients reach the rows."""
        stored = self.inner.weight
        return stored.index_copy(0, self._places(stored.device), self.rows.to(stored.dtype))

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and on the device of hidden states."""
        return self.inner.weight

    @property
    def integers(self) -> frozenset[str]:
        return self.inner.integers

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        self.inner.load(parts)

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The whole matrix, with the trained rows."""
        return [{"weight": self.weight.detach()}]

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        return self.inner.part_shapes(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [..., D]."""
        x = self.inner(tokens)
        found = tokens.unsqueeze(-1) == self._places(tokens.device)
        rows = F.embedding(found.int().argmax(-1), self.rows.to(x.dtype))
        return torch.where(found.any(-1, keepdim=True), rows, x)

    def head(self, x: Tensor) -> Tensor:
        """x [..., D] times the matrix: [..., V]."""
        places, rows = self._places(x.device), self.rows.to(x.dtype)
        logits = F.linear(x, self.inner.weight) if torch.is_grad_enabled() else linear(x, self.inner.weight)
        return logits.index_copy(-1, places, F.linear(x, rows))

    def _places(self, device: Any) -> Tensor:
        return torch.tensor(self.ids, device=device)
