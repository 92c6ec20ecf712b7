"""How long the layers and the ends of a model take, by which it is divided into pipeline stages. Never imports torch."""

from __future__ import annotations

from typing import NamedTuple


class Timed(NamedTuple):
    """Seconds of a micro-batch, forward and backward."""

    layers: tuple[float, ...]
    embedding: float
    head: float
