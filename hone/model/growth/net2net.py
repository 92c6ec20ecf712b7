"""Net2Net: width by copies, whose outgoing weights share those of their original."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from hone.model.growth.width import Width

if TYPE_CHECKING:
    from hone.model.growth.axis import Integers


class Net2Net(Width):
    """Widens by copies that share outgoing weights: the same logits, unless `noise` is set. Chen et al. 2015, arXiv:1511.05641.

    Copies with equal shares have equal gradients and stay copies for ever; with unequal ones, which are as exact, they part
    (Wang et al. 2023, arXiv:2310.07999). RMS norms keep their result because copies of hidden channels are scaled to the mean
    square that the channels had.
    """

    paper: ClassVar[str] = "arXiv:1511.05641"

    shares: Literal["uneven", "even"] = Field(
        "uneven",
        description="What the copies of an entry have of its outgoing weights: random parts that add up to one, or equal parts.",
    )
    mapping: Literal["cyclic", "random"] = Field(
        "cyclic",
        description="Which entry a further one copies: the first, the second, ..., or as in the paper a random one (key heads always in turn).",
    )
    noise_std: float = Field(
        0.0,
        ge=0,
        description="Noise on the rows of copies, relative to the weights' size, which parts equal ones; above 0 the model is not exact.",
    )

    @property
    def exact(self) -> bool:
        return self.noise_std == 0

    @property
    def noise(self) -> float:
        return self.noise_std

    @property
    def uneven(self) -> bool:
        return self.shares == "uneven"

    def sources(self, size: int, grown: int, draw: np.random.Generator) -> Integers:
        if self.mapping == "cyclic":
            return super().sources(size, grown, draw)
        return np.concatenate((np.arange(size), draw.integers(0, size, grown - size)))
