"""The interface of whatever has the weights of a model by name: files, and views that change them when they are read."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor


class WeightSource(Protocol):
    """Named tensors, read on request. A view of another source reads that one's and gives them changed.

    Raises ArtifactError, naming file and tensor, for a missing or corrupt one.
    """

    def names(self) -> list[str]:
        """Every tensor's name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor called `name`, without reading it."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU; its memory may be the mapped file."""
        ...

    def file(self, name: str) -> Path:
        """The file that holds the tensor called `name`, or the one that it is made of."""
        ...

    def close(self) -> None:
        """Unmaps the files; they are opened again on the next read."""
        ...

    def reopened(self) -> Self:
        """The same tensors with memory maps of their own, which are freed with it."""
        ...


class View:
    """A view of `source`. Whatever a subclass does not say of a tensor is what `source` says of the one with that name."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def names(self) -> list[str]:
        """Every tensor's name."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor called `name`, without reading it."""
        return self.source.shape(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, on the CPU."""
        return self.source.tensor(name)

    def file(self, name: str) -> Path:
        """The file that holds the tensor called `name`, or the one that it is made of."""
        return self.source.file(name)

    def close(self) -> None:
        """Unmaps the files."""
        self.source.close()

    def reopened(self) -> Self:
        """The same view of the source, opened again."""
        found = copy(self)
        found.source = self.source.reopened()
        return found
