"""The interface of a storage layout.

Shapes: N output features (rows), K input features (columns), [R, G] the scales of one checkpoint module: R of its
blocks of rows by G of its blocks of columns.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.scheme import Scheme, Stored

Entry = tuple[torch.dtype, tuple[int, ...]]


class Layout(Protocol):
    """The tensors of one checkpoint module, by suffix: 'weight_packed', 'weight_scale' ..., without a bias."""

    method: str
    """`quant_method` of config.json whose checkpoints use it."""
    integers: frozenset[str]
    """Suffixes whose tensors keep their dtype when a model is loaded in another one: codes, not numbers."""
    any_length: frozenset[str] = frozenset()
    """Suffixes of vectors that may have any length in a checkpoint; `tensors` has the one that hone writes."""

    def problem(self, scheme: Scheme) -> str | None:
        """Why the layout cannot hold `scheme`; None when it can."""
        ...

    def shape_problem(self, scheme: Scheme, rows: int, columns: int) -> str | None:
        """Why no library reads a module of this shape; None when they do."""
        return None

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        """Dtype and shape of every tensor of a module [rows, columns]."""
        ...

    def write(self, stored: Stored) -> dict[str, Tensor]:
        """The tensors of one whole module."""
        ...

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        """The inverse of `write`. Raises ArtifactError for tensors of other dtypes than `scheme` has."""
        ...


def typed(part: dict[str, Tensor], suffix: str, dtype: torch.dtype) -> Tensor:
    """The tensor `suffix` of a module. Raises ArtifactError when it has another dtype."""
    found = part[suffix]
    if found.dtype != dtype:
        raise ArtifactError(
            f"{suffix} of a quantized weight is {found.dtype}, config.json's format needs {dtype}",
            fix="pair the weights with the config.json they were saved with",
        )
    return found
