"""Statistics of a linear's calibration inputs, by name: a step's `needs` names those that it reads.

With several ranks each sees a part of the batches; `merge` makes the statistic of all of them, on every rank.

An expert sees the tokens that the router sends to it. Its means are sums over them divided by all tokens of the calibration, so
that those of two experts weigh as much as they are used; "tokens" says how many they are.

Shapes: T tokens of a batch, K input features, S samples.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.cost.compress.compression import hessian_block

LEAST_TOKENS = 16
"""Calibration tokens of an expert below which its matrices are compressed as without calibration. GPTQ of random matrices was at most
2 % worse than rounding to nearest on other tokens of the same distribution from one token on; equal tokens say less."""


class Gathered(Protocol):
    """Accumulates over batches of inputs [T, K], in all `num_tokens` tokens of `columns` features.

    `before` of them are on the ranks before this one.
    """

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None: ...

    def add(self, x: Tensor) -> None:
        """Adds one batch [T, K]."""
        ...

    def merge(self, mesh: Mesh) -> None:
        """Adds what the other ranks have seen, in the order of the ranks."""
        ...

    def value(self) -> Tensor:
        """The statistic over all batches."""
        ...


class Statistic(Gathered, Protocol):
    """A statistic that follows from that of the inputs before a transform multiplied their features."""

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        """The value for inputs multiplied by `factors` [K] > 0."""
        ...


class Hessian:
    """Mean of x x^T, float32 [K, K]. Products of bfloat16 inputs are summed in float32, so only the order of sums differs.

    Only blocks on and above the diagonal are computed (`hessian_block`); the rest is their mirror image.
    """

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        self.num_tokens = num_tokens
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.block = hessian_block(columns)

    def add(self, x: Tensor) -> None:
        low = x.is_cuda and x.dtype != torch.float32
        x = x if low else x.float()
        for begin in range(0, x.shape[1], self.block):
            rows, columns = x[:, begin : begin + self.block].T, x[:, begin:]
            total = self.total[begin : begin + self.block, begin:]
            if low:
                total += torch.mm(rows, columns, out_dtype=torch.float32)
            else:
                total.addmm_(rows, columns)

    def merge(self, mesh: Mesh) -> None:
        mesh.sum(self.total)

    def value(self) -> Tensor:
        for begin in range(0, len(self.total), self.block):
            end = begin + self.block
            self.total[end:, begin:end] = self.total[begin:end, end:].T
        return self.total / self.num_tokens

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return value * factors * factors[:, None]


class Mean:
    """Mean of x, float32 [K]."""

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        self.num_tokens = num_tokens
        self.total = torch.zeros(columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        self.total += x.float().sum(0)

    def merge(self, mesh: Mesh) -> None:
        mesh.sum(self.total)

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

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        self.largest = torch.zeros(columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor) -> None:
        torch.maximum(self.largest, x.float().abs().amax(0), out=self.largest)

    def merge(self, mesh: Mesh) -> None:
        mesh.largest(self.largest)

    def value(self) -> Tensor:
        return self.largest

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return value * factors


class Cross:
    """Mean of (d - x) x^T, float32 [K, K], where d is the same token's input in the model that is not compressed.

    The difference is summed, not d x^T with `Hessian` taken off it: the two are nearly equal.
    """

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        self.num_tokens = num_tokens
        self.total = torch.zeros(columns, columns, dtype=torch.float32, device=device)

    def add(self, x: Tensor, dense: Tensor) -> None:
        """Adds one batch [T, K] and its inputs in the model that is not compressed, [T, K]."""
        change = dense.float() - x.float()
        if x.is_cuda and x.dtype != torch.float32:
            self.total += torch.mm(change.to(x.dtype).T, x, out_dtype=torch.float32)
        else:
            self.total.addmm_(change.T, x.float())

    def merge(self, mesh: Mesh) -> None:
        mesh.sum(self.total)

    def value(self) -> Tensor:
        return self.total / self.num_tokens

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        """The value for inputs of both models multiplied by `factors` [K] > 0."""
        return value * factors * factors[:, None]


class Samples:
    """Inputs [S, K] in their dtype: `LIMIT` evenly spaced tokens, or all if there are fewer."""

    LIMIT = 512

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        count = min(self.LIMIT, num_tokens)
        self.wanted = torch.arange(count) * num_tokens // max(count, 1)
        self.seen = before
        self.kept: list[Tensor] = []
        self.nothing = torch.empty(0, columns, device=device)

    def add(self, x: Tensor) -> None:
        here = self.wanted[(self.wanted >= self.seen) & (self.wanted < self.seen + len(x))] - self.seen
        self.kept.append(x[here.to(x.device)])
        self.seen += len(x)

    def merge(self, mesh: Mesh) -> None:
        self.kept = [mesh.joined(torch.cat(self.kept or [self.nothing]))]

    def value(self) -> Tensor:
        return torch.cat(self.kept)

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return (value * factors).to(value.dtype)


class Tokens:
    """Number of tokens, int64 [1]."""

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        self.count = torch.zeros(1, dtype=torch.int64, device=device)

    def add(self, x: Tensor) -> None:
        self.count += len(x)

    def merge(self, mesh: Mesh) -> None:
        mesh.sum(self.count)

    def value(self) -> Tensor:
        return self.count

    @staticmethod
    def scaled(value: Tensor, factors: Tensor) -> Tensor:
        return value


STATISTICS: dict[str, type[Statistic] | type[Cross]] = {
    "hessian": Hessian,
    "cross": Cross,
    "mean": Mean,
    "absmean": AbsMean,
    "meansquare": MeanSquare,
    "absmax": AbsMax,
    "samples": Samples,
    "tokens": Tokens,
}

PAIRED = frozenset({"cross"})
"""Statistics of two models' inputs: hidden states of the model that is not compressed are then kept as well."""


class Extremes:
    """Smallest and largest x of each batch, float32 [batches, 2]."""

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        self.batches = [torch.empty(0, 2, device=device)]

    def add(self, x: Tensor) -> None:
        if x.numel():
            self.batches.append(torch.stack(x.aminmax()).float()[None])

    def merge(self, mesh: Mesh) -> None:
        self.batches = [mesh.joined(torch.cat(self.batches))]

    def value(self) -> Tensor:
        return torch.cat(self.batches)


class Histogram:
    """How often each number of bfloat16 is the nearest to an x, int64 [65536] by the number's 16 bits.

    It needs no range in advance, resolves every magnitude to 2^-8 of itself, and does not depend on the order of batches;
    of bfloat16 inputs it is exact.
    """

    CHUNK = 1 << 22

    def __init__(self, columns: int, num_tokens: int, device: torch.device, before: int = 0) -> None:
        self.counts = torch.zeros(1 << 16, dtype=torch.int64, device=device)

    def add(self, x: Tensor) -> None:
        for part in x.to(torch.bfloat16).flatten().view(torch.uint16).split(self.CHUNK):
            self.counts += torch.bincount(part.to(torch.int32), minlength=1 << 16)

    def merge(self, mesh: Mesh) -> None:
        mesh.sum(self.counts)

    def value(self) -> Tensor:
        return self.counts


RANGES: dict[str, type[Gathered]] = {"extremes": Extremes, "histogram": Histogram}
"""Statistics of all inputs together, which observers read. What a transform does to columns does not carry over to them, so
they are gathered after transforms."""


def uncalibrated(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """`values` as inputs would give them that say nothing about the columns: each of size 1, independent of the others. Steps then do
    what they would without calibration: GPTQ rounds to nearest, SparseGPT and Wanda prune by magnitude."""
    found = dict(values)
    for name in values.keys() & STATISTICS.keys() - {"tokens", "samples"}:
        value, square = values[name], values[name].dim() == 2
        found[name] = torch.eye(len(value)).to(value) if square else torch.full_like(value, float(name != "mean"))
    return found


def pooled(values: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The `RANGES` among `values` of all experts of one input together, for an expert that saw no tokens."""
    found = {}
    for name in values[0].keys() & RANGES.keys():
        each = [one[name] for one in values]
        found[name] = torch.cat(each) if name == "extremes" else torch.stack(each).sum(0)
    return found
