"""How the copies of a data-parallel training add up a gradient: the backend's all-reduce, an own algorithm, or a compressed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.parallel.axis import Axis
from hone.parallel.collectives import halving, ring, tree
from hone.train.data_parallel.flat import Flat

ALGORITHMS: dict[str, Callable[[Axis, Tensor], Tensor]] = {
    "ring": ring.all_reduce,
    "halving": halving.all_reduce,
    "doubling": halving.doubling,
    "tree": tree.all_reduce,
}


class Handle(Protocol):
    """Something to wait for."""

    def wait(self) -> None:
        """Returns when the sum is there."""


class Sum:
    """Adds up the same part of a gradient over the ranks of an axis: here by the backend (NCCL, gloo), without waiting."""

    def start(self, axis: Axis, flat: Flat, part: Tensor, bucket: str) -> Handle | None:
        """Replaces `part` (float32, flat, laid out as `flat` says where one rank holds all of it) by the sum; None: it is there.

        `bucket` is the same for the same part of the model in every step.
        """
        return axis.all_reduce(part)

    def state(self) -> dict[str, Tensor]:
        """What this rank carries from step to step, by a name without its rank."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restores the result of `state`; an empty one is that of the first step."""


class Algorithm(Sum):
    """One of the readable algorithms of `hone.parallel.collectives`, on its own time."""

    def __init__(self, name: str) -> None:
        self._all_reduce = ALGORITHMS[name]

    def start(self, axis: Axis, flat: Flat, part: Tensor, bucket: str) -> None:
        """As `Sum.start`."""
        if axis.size > 1:
            self._all_reduce(axis, part)


class Rounded(Sum):
    """Gradients travel in bfloat16: half the bytes, and each rank's values and sums are rounded to 8 significant bits."""

    def start(self, axis: Axis, flat: Flat, part: Tensor, bucket: str) -> Handle | None:
        """As `Sum.start`."""
        short = part.bfloat16()
        moving = axis.all_reduce(short)
        return None if moving is None else _Copied(moving, part, short)


class _Copied:
    def __init__(self, moving: Any, into: Tensor, source: Tensor) -> None:
        self._moving, self._into, self._source = moving, into, source

    def wait(self) -> None:
        self._moving.wait()
        self._into.copy_(self._source)


class LowRank(Sum):
    """PowerSGD: of each matrix only P = M Q and M^T P travel, with `rank` columns; what they miss is added to the next gradient.

    Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2, with sums for means: M is a rank's gradient plus its error. P is
    summed and made orthonormal, Q = M^T P is summed, and P Q^T is the gradient of all: P P^T (sum of all M). A rank's error is
    M - P P^T M, so that errors and gradient together are the sum of all M: nothing is lost, only delayed. Q of one step is
    where the next one starts. Vectors, and matrices that would not become smaller, are summed as they are.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._errors: dict[str, Tensor] = {}
        """The error of each bucket, flat as its gradient."""
        self._starts: dict[str, Tensor] = {}
        """Q of each matrix, [columns, rank]."""

    def start(self, axis: Axis, flat: Flat, part: Tensor, bucket: str) -> Handle | None:
        """As `Sum.start`. Waits for P."""
        if axis.size == 1:
            return None
        names = [name for name, shape in flat.shapes.items() if self._compresses(shape)]
        error = self._errors.setdefault(bucket, torch.zeros_like(part))
        matrices = {name: flat.view(part, name).add_(flat.view(error, name)) for name in names}
        left = [matrix @ self._start(name, matrix) for name, matrix in matrices.items()]
        _wait(axis.all_reduce(together := _joined(left)))
        left = [torch.linalg.qr(p).Q for p in _apart(together, left)]
        right = [matrix.T @ p for matrix, p in zip(matrices.values(), left, strict=True)]
        for name, p, q in zip(names, left, right, strict=True):
            flat.view(error, name).copy_(matrices[name] - p @ q.T)
        plain = [flat.view(part, name) for name in flat.shapes if name not in matrices]
        sent = _joined([*right, *plain])
        _wait(axis.all_reduce(sent))
        found = _apart(sent, [*right, *plain])
        for name, p, q in zip(names, left, found, strict=False):
            self._starts[name] = q.clone()
            flat.view(part, name).copy_(p @ q.T)
        for view, value in zip(plain, found[len(names) :], strict=True):
            view.copy_(value)
        return None

    def _compresses(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and self.rank * sum(shape) < shape[0] * shape[1]

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        """Q from the step before; in the first one the same random numbers on every rank."""
        if name not in self._starts:
            draw = torch.Generator().manual_seed(sum(name.encode()))
            self._starts[name] = torch.randn(matrix.shape[1], self.rank, generator=draw).to(matrix.device)
        return self._starts[name]

    def state(self) -> dict[str, Tensor]:
        """As `Sum.state`."""
        errors = {f"error.{bucket}": error for bucket, error in self._errors.items()}
        return errors | {f"start.{name}": start for name, start in self._starts.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """As `Sum.restore`."""
        kept: dict[str, dict[str, Tensor]] = {"error": {}, "start": {}}
        for label, tensor in state.items():
            kind, _, name = label.partition(".")
            kept[kind][name] = tensor
        self._errors, self._starts = kept["error"], kept["start"]


def _wait(moving: Handle | None) -> None:
    if moving is not None:
        moving.wait()


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1) for one in tensors])


def _apart(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [part.view(one.shape) for part, one in zip(flat.split([one.numel() for one in like]), like, strict=True)]
