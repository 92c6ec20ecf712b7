"""Statistics of a linear's calibration inputs, by name: a step's `needs` names those that it reads.

Shapes: T tokens of a batch, K input features, S samples.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Statistic(Protocol):
    """Base: accumulates over batches of inputs [T, K], in all `num_tokens` tokens of `columns` features."""

    def __init__(self, columns: int, num_tokens: int, device: torch.device) -> None: ...

    def add(self, x: Tensor) -> None:
        """Adds one batch [T, K]."""
        ...

    def value(self) -> Tensor:
        """The statistic over all batches."""
        ...

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        """The value for inputs multiplied by `factors` [K] > 0."""
        ...


class Hessian:
    """Mean of x x^T, float32 [K, K]. Products of bfloat16 inputs are summed in float32, so only the order of sums differs."""

    def __init__(self, columns: int, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        if x.is_cuda and x.dtype != torch.float32:
            self.total += torch.mm(x.T, x, out_dtype=torch.float32)
        else:
            x = x.float()
            self.total.addmm_(x.T, x)

    def value(self) -> Tensor:
        return self.total / self.num_tokens

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return value * factors * factors[:, None]


class Mean:
    """Mean of x, float32 [K]."""

    def __init__(self, columns: int, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self.total = torch.zeros(columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        self.total += x.float().sum(0)

    def value(self) -> Tensor:
        return self.total / self.num_tokens

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return value * factors


class AbsMean(Mean):
    """Mean of |x|, float32 [K]."""

    def add(self, x: Tensor) -> None:
        self.total += x.float().abs().sum(0)


class MeanSquare(Mean):
    """Mean of x^2, float32 [K]: the diagonal of `Hessian`."""

    def add(self, x: Tensor) -> None:
        self.total += x.float().square().sum(0)

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return value * factors.square()


class AbsMax:
    """Largest |x|, float32 [K]."""

    def __init__(self, columns: int, num_tokens: int, device: torch.device) -> None:
        self.largest = torch.zeros(columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        torch.maximum(self.largest, x.float().abs().amax(0), out=self.largest)

    def value(self) -> Tensor:
        return self.largest

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return value * factors


class Cross:
    """Mean of (d - x) x^T, float32 [K, K], where d is the same token's input in the model that is not compressed.

    The difference is summed, not d x^T with `Hessian` taken off it: the two are nearly equal.
    """

    def __init__(self, columns: int, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Adds one batch [T, K] and its inputs in the model that is not compressed, [T, K]."""
        change = dense.float() - x.float()
        if x.is_cuda and x.dtype != torch.float32:
            self.total += torch.mm(change.to(x.dtype).T, x, out_dtype=torch.float32)
        else:
            self.total.addmm_(change.T, x.float())

    def value(self) -> Tensor:
        return self.total / self.num_tokens

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        """The value for inputs of both models multiplied by `factors` [K] > 0."""
        return value * factors * factors[:, None]


class Samples:
    """Inputs [S, K] in their dtype: `LIMIT` evenly spaced tokens, or all if there are fewer."""

    LIMIT = 512

    def __init__(self, columns: int, num_tokens: int, device: torch.device) -> None:
        count = min(self.LIMIT, num_tokens)
        self.wanted = torch.arange(count) * num_tokens // max(count, 1)
        self.seen = 0
        self.kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        here = self.wanted[(self.wanted >= self.seen) & (self.wanted < self.seen + len(x))] - self.seen
        self.kept.append(x[here.to(x.device)])
        self.seen += len(x)

    def value(self) -> Tensor:
        return torch.cat(self.kept)

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return (value * factors).to(value.dtype)


STATISTICS: dict[str, type[Statistic] | type[Cross]] = {
    "hessian": Hessian,
    "cross": Cross,
    "mean": Mean,
    "absmean": AbsMean,
    "meansquare": MeanSquare,
    "absmax": AbsMax,
    "samples": Samples,
}

PAIRED = frozenset({"cross"})
"""Statistics of two models' inputs: hidden states of the model that is not compressed are then kept as well."""
