"""Temperature mixture: sizes to a power below 1, so that small sources get more weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.feed.mix.base import Mixture, Source, sizes


class Temperature(Mixture):
    """Weights in proportion to tokens^(1/T): T = 1 is proportional, a large T uniform. Conneau et al. 2019, arXiv:1911.02116."""

    paper: ClassVar[str] = "arXiv:1911.02116"
    temperature: float = Field(3.33, gt=0, description="T; 3.33 is the power 0.3 of XLM-R and mT5.")

    def wants(self, sources: Sequence[Source], budget: float) -> tuple[np.ndarray, list[float | None], list[str]]:
        tokens = sizes(sources)
        share = tokens / tokens.sum()
        # Relative to the largest: with a low temperature all would underflow otherwise.
        wanted = (tokens / tokens.max()) ** (1 / self.temperature)
        return (
            wanted,
            [None] * len(sources),
            [f"{part:.1%} of all tokens to the power 1/{self.temperature:g}" for part in share],
        )
