"""Forward passes whose rows of experts travel in rooms: the host waits for no layer, and asks once a pass whether all rows did fit.

It asks where it has given the whole forward pass to the GPU, so that the GPU goes on meanwhile. The gradients are not begun yet: where a piece had
more rows than room, which all ranks of the exchange see alike, the pass is made again with exact sizes (`hone.parallel.piece_bound`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hone.base.ranks import Mesh
from hone.model.decoder import Decoder
from hone.parallel.piece_bound import PieceBound

T = TypeVar("T")


class RoomyPasses:
    """The passes of a training of `model`; one without divided experts makes them as they are.

    Where the experts' ranks are only some of the training's, all ranks tell each other whether theirs did fit: gathers of weights and sums of
    gradients are between all of them.
    """

    def __init__(self, model: Decoder, mesh: Mesh) -> None:
        every = (getattr(getattr(layer, "feed_forward", None), "exchange", None) for layer in model.layers)
        self._exchange: Any = next((one for one in every if one is not None), None)
        self._mesh = mesh
        self.fixed = True
        """Whether rooms are fixed where they may be; else sizes are exact in every pass."""

    @property
    def bound(self) -> PieceBound | None:
        """The rooms; None without divided experts."""
        return None if self._exchange is None else self._exchange.bound

    def forward(self, make: Callable[[], T]) -> T:
        """What `make`, a forward pass, returns. Recomputation is in the same rooms, until `ended`."""
        bound = self.bound
        if bound is None or not self.fixed:
            return make()
        bound.begin()
        try:
            made = make()
            over = bound.settle()
            if self._exchange.axis.size < self._mesh.world_size:
                over = any(self._mesh.gather(over))
            if over:
                del made
                bound.close()
                made = make()
        except BaseException:
            self.ended()
            raise
        return made

    def ended(self) -> None:
        """After the backward pass."""
        if self.bound is not None:
            self.bound.close()
