"""A compression in numbers: its matrices with their work, its calibration, and the passes that measure importances before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hone.cost.dims import ModelDims
from hone.cost.memory import BYTES
from hone.cost.work import Work


@dataclass(frozen=True)
class MatrixWork:
    """One matrix [rows, columns], the work of each step on it, and the fraction of the calibration tokens that it reads."""

    rows: int
    columns: int
    steps: tuple[Work, ...]
    share: float = 1.0

    @property
    def size(self) -> int:
        return self.rows * self.columns


class Passes(NamedTuple):
    """The passes over all calibration tokens by which a structured pruner or a conversion measures."""

    forward: float
    """Forward passes through all layers."""
    logits: int = 0
    """Passes through the head."""
    variants: int = 1
    """Hidden states of all calibration tokens that are in memory at once."""
    observed: int = 0
    """Activations per token that are read besides."""
    whole: bool = False
    """Whether all layers are in memory at once."""


@dataclass(frozen=True)
class Compression:
    """A compression in numbers: the matrices of each layer, shard sizes (the first outside the layers, the last of `head`),
    calibration."""

    dims: ModelDims
    layers: tuple[tuple[MatrixWork, ...], ...]
    shard_bytes: tuple[int, ...]
    stored_width: int
    """Bytes of a weight in the checkpoint."""
    dtype: str
    """Dtype of the forward passes."""
    num_sequences: int = 0
    """Calibration sequences; 0 without calibration."""
    seq_len: int = 0
    batch_size: int = 1
    measured: tuple[tuple[Compression, Passes], ...] = ()
    """The passes of structured pruners before, each with the model on which it runs, whose matrices and shards do not count."""
    paired: bool = False
    """Whether the inputs of the model that is not compressed are computed as well, and their products with the others."""
    range_bytes: float = 0.0
    """Bytes moved for each value of a linear's input by the statistics of its range."""
    rounding_bytes: float = 0.0
    """The same for rounding it in the second pass, which then dequantizes the weights for every batch."""
    codes: str = ""
    """The recipe by which a GPU multiplies codes of 8 bits by rounded inputs, as `forward_seconds` takes it; "": it does not."""
    cache_bytes: float = 0.0
    """Bytes moved for each token and layer by the statistics of keys and values, in a pass of their own; 0 without it."""
    check_sequences: int = 0
    """Sequences on which the predictions of both models are compared at the end."""
    reshaped: bool = False
    """Whether layers have other shapes than the given model's: then rank 0 alone compares both, each loaded again layer by layer."""
    ends_bytes: float = 0.0
    """Bytes moved besides for each weight outside the layers."""
    adapter_bytes: int = 0
    """Bytes of an adapter, which is written layer by layer and once more as a whole."""
    probes: int = 0
    """Sequences that the whole uncompressed model, held in memory, computes besides: each matrix changed in turn."""
    differentiated: int = 0
    """Sequences on which that model is differentiated, one at a time."""
    head: tuple[tuple[MatrixWork, ...], ...] = ()
    """The head's matrix, as a layer after the last one whose forward pass is not needed; empty where it is not compressed."""
    sensitivities: Compression | None = None
    """The measuring of what each matrix loses with fewer bits, before all else; None without an allocation."""
    embedding: tuple[tuple[MatrixWork, ...], ...] = ()
    """The embedding's matrix, which is rounded first of all; empty where it is not compressed."""

    @property
    def tokens(self) -> int:
        """Calibration tokens."""
        return self.num_sequences * self.seq_len

    def share(self, num_ranks: int, sequences: int | None = None) -> float:
        """The fraction of the calibration (or of other `sequences`) on the rank that has most: whole batches of it."""
        batches = -(-(self.num_sequences if sequences is None else sequences) // self.batch_size)
        return -(-batches // num_ranks) / batches if batches else 0.0

    def checked_share(self, num_ranks: int, rank: int | None = None) -> float:
        """The fraction of the check's sequences on `rank` (None: on the one that has most)."""
        if self.reshaped:
            return 0.0 if rank else 1.0
        return self.share(num_ranks, self.check_sequences)

    @property
    def states_bytes(self) -> int:
        """Bytes of the hidden states of all calibration tokens."""
        return (1 + self.paired) * self.tokens * self.dims.hidden_size * BYTES[self.dtype]


def hessian_block(columns: int) -> int:
    """Rows of the sum of x x^T [columns, columns] that one product computes, from the diagonal to the right.

    Eight blocks leave 9/16 of the products; fewer than 1,024 rows do not keep a GPU busy.
    """
    return max(-(-columns // 8), 1024)
