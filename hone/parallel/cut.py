"""The part of a tensor that a tensor-parallel rank holds: some ranges of one of its axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Cut(NamedTuple):
    """Ranges (start, stop) of `axis` of a tensor of `shape`, put together in order."""

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[int, int], ...]
    inner: Cut | None = None
    """Which part of these ranges, one then, the rank has; None: all of them."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        if self.inner is not None:
            return self.inner.local_shape
        shape = list(self.shape)
        shape[self.axis] = sum(stop - start for start, stop in self.ranges)
        return tuple(shape)

    def take(self, whole: Tensor) -> Tensor:
        """The part of `whole`, as a new tensor."""
        import torch

        if self.inner is not None:
            return self.inner.take(self._of(whole))
        return torch.cat([whole.narrow(self.axis, start, stop - start) for start, stop in self.ranges], self.axis)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes the part into `whole`."""
        if self.inner is not None:
            self.inner.put(part, self._of(whole))
            return
        at = 0
        for start, stop in self.ranges:
            whole.narrow(self.axis, start, stop - start).copy_(part.narrow(self.axis, at, stop - start))
            at += stop - start

    def _of(self, whole: Tensor) -> Tensor:
        """The range of `whole` that `inner` is a part of."""
        ((start, stop),) = self.ranges
        return whole.narrow(self.axis, start, stop - start)

    @classmethod
    def read(cls, values: list) -> Cut:
        """The cut that was written as JSON."""
        shape, axis, ranges, *inner = values
        own = cls.read(inner[0]) if any(inner) else None
        return cls(tuple(shape), axis, tuple((start, stop) for start, stop in ranges), own)
