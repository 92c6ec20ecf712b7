"""A GPU's weights come to the host's memory through a pinned buffer, from which all threads write them."""

from __future__ import annotations

import torch
from torch import Tensor

STAGED = 1 << 26
"""Bytes that come at a time."""

SMALL = 1 << 21
"""Bytes of a tensor that comes directly."""


class Stage:
    """A pinned buffer. A GPU's copy to memory that is not pinned is written by one thread, page by page: the masters of an 8B model
    took 29 s, and take 9 s this way."""

    def __init__(self) -> None:
        self._room: Tensor | None = None

    @torch.no_grad()
    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        """Copies `source`, of any device and dtype, into `target` in the host's memory, and returns it."""
        if source.device.type != "cuda" or source.nbytes < SMALL:
            return target.copy_(source)
        if self._room is None:
            self._room = torch.empty(STAGED, dtype=torch.uint8, pin_memory=True)
        given, taken = source.contiguous().view(-1), target.view(-1)
        most = STAGED // given.element_size()
        for start in range(0, len(given), most):
            part = given[start : start + most]
            held = self._room[: part.nbytes].view(part.dtype).copy_(part)
            taken[start : start + most].copy_(held)
        return target
