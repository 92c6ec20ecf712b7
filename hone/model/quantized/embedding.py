"""An embedding whose matrix stays quantized: rows are looked up as codes, and those rows alone are dequantized.

Shapes: V tokens of the vocabulary, D hidden width, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hone.base.errors import ArtifactError
from hone.model.linear import LINEARS
from hone.model.linear_spec import LinearSpec
from hone.model.quantized.scheme import Scheme


class QuantizedEmbedding(nn.Module):
    """The vectors of tokens: row `token` of a quantized matrix [V, D], which is also the head's where embeddings are tied.

    `table` is the linear that holds the matrix in one of compressed-tensors' layouts; `rows(index, dtype)` of it are the
    vectors. They have the dtype of `like`, an empty tensor that loading sets: scales keep the dtype in which they are stored.
    """

    bias: None = None

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [..., D]."""
        return self.table.rows(tokens.flatten(), self.like.dtype).view(*tokens.shape, self.in_features)

    def head(self, x: Tensor) -> Tensor:
        """The logits [..., V] of x [..., D], where the head is tied."""
        return self.table(x)

    @property
    def in_features(self) -> int:
        """D."""
        return self.table.in_features

    @property
    def scheme(self) -> Scheme:
        """How the matrix is stored."""
        return self.table.scheme

    @property
    def integers(self) -> frozenset[str]:
        """Suffixes of the checkpoint tensors that hold codes."""
        return self.table.integers

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """As of a linear: the tensors of one checkpoint module."""
        self.table.load(parts)

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """As of a linear."""
        return self.table.parts(rows)

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """As of a linear."""
        return self.table.part_shapes(rows)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix [V, D] in `dtype`."""
        return self.table.dequantize(dtype)


def make_embedding(
    spec: LinearSpec, kind: str, options: dict[str, Any], *, tied: bool, where: object
) -> QuantizedEmbedding:
    """The embedding that `spec` describes, stored as the row `kind` of LINEARS with its `options` (`config.linear_of`).

    A tied one is also multiplied, by the kernels of that linear. Another is only looked up: it is kept row by row, as it is
    stored. Raises ArtifactError, with the folder `where`, for one whose inputs would be rounded: they are tokens.
    """
    if options["scheme"].activations is not None:
        raise ArtifactError(
            f"{where}: quantization_config rounds the inputs of the embedding, which are numbers of tokens",
            fix="leave input_activations out of the group that targets Embedding",
        )
    table = LINEARS[kind if tied else "dequantizing"]
    return QuantizedEmbedding(table(spec.in_features, spec.out_features, False, **options))
