"""A linear whose weight keeps two of every four neighbouring columns (2:4), compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hone.base.errors import ArtifactError, SpecError
from hone.model.linear_spec import dense_shapes
from hone.ops import sparse_linear
from hone.ops.linear.sparse import Sparse24, compress_24


class SemiStructured(nn.Module):
    """y = x W^T + b with two of every four neighbouring weights kept, in nine sixteenths of the dense bytes (ten on a GPU). Mishra et al. 2021, arXiv:2104.08378.

    Checkpoint tensors are those of a dense linear, with zeros.
    """

    paper: ClassVar[str] = "arXiv:2104.08378"
    integers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.packed: Sparse24 | None = None
        self.register_buffer("values", torch.empty(out_features, in_features // 2))
        self.register_buffer("bias", torch.empty(out_features) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]; on a GPU of two kernels, see `hone.ops.sparse_linear`, elsewhere by the unpacked weight."""
        return sparse_linear(x, self.weight, self.bias)

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Stacks `parts`, each {"weight": [rows, in], "bias": [rows] when this layer has one}. Raises ArtifactError if they are not 2:4."""
        weight = parts[0]["weight"] if len(parts) == 1 else torch.cat([part["weight"] for part in parts])
        assert weight.shape == (self.out_features, self.in_features), f"stacked to {tuple(weight.shape)}"
        try:
            self._keep(weight)
        except SpecError as error:
            raise ArtifactError(error.what, fix="load it dense, or prune it with pattern 2:4 first") from None
        if self.bias is not None:
            self.bias = torch.cat([part["bias"] for part in parts])

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The dense tensors split at `rows` output rows each."""
        weights = self.weight.dense().split(rows)
        if self.bias is None:
            return [{"weight": weight} for weight in weights]
        return [{"weight": weight, "bias": bias} for weight, bias in zip(weights, self.bias.split(rows), strict=True)]

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """What `load` expects: the shape of every tensor of each part."""
        return dense_shapes(rows, self.in_features, bias=self.bias is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight [N, K] in `dtype`."""
        return self.weight.dense().to(dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, 2:4"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Another device or dtype has another compressed form.
        if self.packed is None:
            return super()._apply(fn, recurse)
        dense = self.packed.dense()
        super()._apply(fn, recurse)
        self._keep(fn(dense))
        return self

    @property
    def weight(self) -> Sparse24:
        """The compressed weight."""
        assert self.packed is not None, "the weight is not loaded yet"
        return self.packed

    def _keep(self, weight: Tensor) -> None:
        self.packed = compress_24(weight)
        self.values = self.packed.values
