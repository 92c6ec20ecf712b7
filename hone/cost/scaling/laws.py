"""Published fits of the loss over parameters and tokens, L = E + A / N^alpha + B / D^beta, and sizes that are optimal by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hone.base.errors import FitError


class Law(NamedTuple):
    """One fit. `source` says where its constants are printed."""

    name: str
    floor: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        """Loss in nats a token."""
        return self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def tokens_for(self, loss: float, parameters: float) -> float:
        """Tokens at which a model of `parameters` reaches `loss`. FitError: it never does."""
        rest = loss - self.floor - self.a / parameters**self.alpha
        if rest <= 0:
            raise FitError(
                f"{parameters:.3g} parameters do not reach a loss of {loss:.4g} by the fit {self.name}: without end it is "
                f"{self.floor + self.a / parameters**self.alpha:.4g}",
                fix="take more parameters, or a higher loss",
            )
        return (self.b / rest) ** (1 / self.beta)

    def compute_optimal(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the least loss for 6 N D = `flops`. Hoffmann et al. 2022, eq. 4."""
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = g * (flops / 6) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / 6 / parameters

    def chinchilla_tokens(self, parameters: float) -> float:
        """Tokens for which `parameters` is the compute-optimal size."""
        return (self.beta * self.b / (self.alpha * self.a)) ** (1 / self.beta) * parameters ** (self.alpha / self.beta)

    def cheapest(self, loss: float, cost) -> tuple[float, float, float]:  # type: ignore[no-untyped-def]
        """Parameters, tokens and cost of the cheapest model that reaches `loss`, where `cost(N, D)` is to be least.

        A search over log N, first on a grid and then by golden section: cost along a line of equal loss has one minimum.
        """
        lowest = (self.a / (loss - self.floor)) ** (1 / self.alpha)

        def along(place: float) -> float:
            parameters = lowest * np.exp(place)
            return float(cost(parameters, self.tokens_for(loss, parameters)))

        places = np.linspace(1e-3, 12.0, 400)
        values = [along(place) for place in places]
        best = int(np.argmin(values))
        left, right = places[max(best - 1, 0)], places[min(best + 1, len(places) - 1)]
        golden = (np.sqrt(5) - 1) / 2
        while right - left > 1e-9:
            first, second = right - golden * (right - left), left + golden * (right - left)
            if along(first) < along(second):
                right = second
            else:
                left = first
        parameters = lowest * float(np.exp((left + right) / 2))
        tokens = self.tokens_for(loss, parameters)
        return parameters, tokens, float(cost(parameters, tokens))


LAWS = {
    "hoffmann": Law("hoffmann", 1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, arXiv:2203.15556, eq. 10"),
    "hoffmann_source": Law(
        "hoffmann_source", 1.6934, 406.4, 410.7, 0.3392, 0.2849, "the same, exponents of its TeX source"
    ),
    "sardana": Law(
        "sardana", 1.69, 406.4, 410.7, 0.336, 0.283, "Sardana et al. 2024, arXiv:2401.00448, exponents of its check"
    ),
    "besiroglu": Law("besiroglu", 1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024, arXiv:2404.10102"),
}
"""Fits of the same runs: they differ, and so does what follows from them."""
