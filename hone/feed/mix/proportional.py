"""Proportional mixture: every source in proportion to its tokens, as if all were one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hone.feed.mix.base import Mixture, Source, sizes


class Proportional(Mixture):
    """Weights in proportion to tokens: every source has the same number of epochs."""

    def wants(self, sources: Sequence[Source], budget: float) -> tuple[np.ndarray, list[float | None], list[str]]:
        tokens = sizes(sources)
        share = tokens / tokens.sum()
        return share, [None] * len(sources), [f"has {part:.1%} of all tokens" for part in share]
