"""The context of a head's unrolled steps in training: step i attends to what the steps before stored, as it will when it guesses.

A position of step 0 attends to all before it in its document and to itself. A position of step i > 0 stands i places later: it attends to
the same keys of step 0, and of the later steps up to its own to the one key at its own index, which is what lies between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.model.context import Context, sdpa


class Unrolled(Context):
    """Keys and values of all steps of a pass whose positions are those of `context` [B, S]."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._first = context.positions
        self.positions = self._first
        self.rope_len = context.rope_len if context.rope_len is not None else context.seq_len
        self._keys_of: list[tuple[Tensor, Tensor]] = []
        size = self._first.shape[-1]
        line = torch.arange(size, device=self._first.device)
        seen = line[:, None] >= line
        ids = context.document_ids
        if ids is not None:
            seen = seen & (ids[..., :, None] == ids[..., None, :]).unsqueeze(-3)
        self._seen, self._own = seen, torch.eye(size, dtype=torch.bool, device=line.device)

    def begin(self, step: int) -> None:
        """Before each step, from 0."""
        self.positions = self._first + step
        self._rotary.clear()

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
        assert k is not None and v is not None and window is None and softcap is None and sinks is None
        self._keys_of.append((k, v))
        later = len(self._keys_of) - 1
        own = self._own.expand(*self._seen.shape[:-2], *self._own.shape)
        mask = torch.cat([self._seen, *[own] * later], -1)
        keys, values = (torch.cat([step[part] for step in self._keys_of], -3) for part in (0, 1))
        return sdpa(q, keys, values, mask, scale)

    def expect(self, x: Tensor, head_dim: int, window: int | None, **options: Any) -> None:
        pass
