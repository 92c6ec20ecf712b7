"""Fixed mixture: weights given by the user."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field, field_validator

from hone.base.errors import SpecError
from hone.feed.mix.base import Chosen, Mixture, Source, by_source, more


class Fixed(Mixture):
    """The weights given, scaled to sum to one; a source with weight 0 is left out."""

    weights: dict[str, float] = Field(description="Weight of each source; every source must be named.")

    @field_validator("weights")
    @classmethod
    def _can_be_scaled(cls, weights: dict[str, float]) -> dict[str, float]:
        if any(not 0 <= weight < float("inf") for weight in weights.values()) or not sum(weights.values()) > 0:
            raise ValueError("weights are numbers >= 0, at least one of them above 0")
        return weights

    def weigh(self, sources: Sequence[Source], budget: float) -> Chosen:
        """As every mixture, but a cap that a weight exceeds is an error: given weights are not changed."""
        chosen = super().weigh(sources, budget)
        for row in chosen.shares:
            if row.weight < row.wanted - 1e-9:
                epochs = row.epochs * row.wanted / row.weight
                raise SpecError(
                    f"mixture.weights gives '{row.source}' {row.wanted:.4g} of {budget:.0f} positions, {epochs:.4g} epochs; "
                    f"max_epochs is {self.max_epochs:g}",
                    fix=f"raise max_epochs to at least {more(epochs)}, or lower its weight",
                )
        return chosen

    def wants(self, sources: Sequence[Source], budget: float) -> tuple[np.ndarray, list[float | None], list[str]]:
        wanted = np.array(by_source(self.weights, sources, "mixture.weights"), float)
        return wanted, [None] * len(sources), [f"given as {weight:g}" for weight in wanted]
