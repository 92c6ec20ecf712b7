"""A layer's weights as data: its linears, their pieces and inputs, and its other parameters. Never imports torch.

A mixer or feed-forward declares these once. Parameter counts, FLOPs, module construction, checkpoint names, fused
loading, initialisation, calibration points, quantization and adapter targets and tensor-parallel shards all follow from
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hone.base.errors import SpecError

INIT_STD = 0.02

Shard = Literal["column", "row", "vocab", "none"]

Initial = tuple[float, float] | Callable[..., Any]
"""Initial distribution of a parameter: (mean, std) of a normal, or a function (shape, torch.Generator) -> float32 tensor on the CPU."""


AxisKind = Literal["hidden", "heads", "kv_heads", "channels", "experts"]
"""What rows or columns are: channels of the residual stream, heads, key and value heads, inner channels that a block may have more
or fewer of, or a router's scores of experts."""


@dataclass(frozen=True)
class Norm:
    """An input: what a norm gives. A scale a channel can be divided out of its weight + offset."""

    name: str
    """Its path in the layer: 'mixer_norm' for that of a block's input, 'mixer.latent_norm' for one of the block."""

    @property
    def of_stream(self) -> bool:
        """Whether it norms the residual stream."""
        return "." not in self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Output:
    """An input that is a linear function of the rows `piece` of another linear, of which a scale a channel can be divided out."""

    linear: str
    """The path of that linear in the layer: 'mixer.qkv'."""
    piece: str

    def __str__(self) -> str:
        return f"{self.linear}.{self.piece}"


@dataclass(frozen=True)
class Product:
    """An input that is the product of outputs; a scale can be divided out of the last one."""

    factors: tuple[Output, ...]

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors))


@dataclass(frozen=True)
class Stream:
    """An input: the residual stream itself, before a block without a norm in front of it."""

    block: str

    def __str__(self) -> str:
        return f"{self.block}_input"


@dataclass(frozen=True)
class Tokens:
    """An input: token ids, of which each reads a row."""

    def __str__(self) -> str:
        return "tokens"


@dataclass(frozen=True)
class Computed:
    """Any other input, out of whose source no scale can be divided."""

    name: str
    """Linears of a layer that read one name read one thing: 'mixer.mixed'."""

    def __str__(self) -> str:
        return self.name


Input = Norm | Output | Product | Stream | Tokens | Computed


@dataclass(frozen=True)
class Piece:
    """Consecutive output rows of a linear that are one module in checkpoints, such as the queries of a fused qkv."""

    name: str
    out_features: int
    heads: int | None = None
    """Number of heads that the rows are divided into; a tensor-parallel rank takes whole heads. None: it may take any rows."""
    replicate: bool = False
    """Whether ranks may hold the same rows: with more ranks than heads several ranks hold one head; without heads each holds all."""

    def rows(self, rank: int, num_ranks: int, linear: str = "") -> slice:
        """The rows of this piece that `rank` of `num_ranks` holds. Raises SpecError when they cannot be divided."""
        if self.replicate and self.heads is None:
            return slice(0, self.out_features)
        count = self.out_features if self.heads is None else self.heads
        if self.replicate and count < num_ranks and num_ranks % count == 0:
            width, first = self.out_features // count, rank * count // num_ranks
            return slice(first * width, (first + 1) * width)
        _must_divide(count, num_ranks, f"{linear or self.name}.{self.name}", "rows" if self.heads is None else "heads")
        width = self.out_features // num_ranks
        return slice(rank * width, (rank + 1) * width)


@dataclass(frozen=True)
class LinearSpec:
    """y = x W^T (+ b), W [out_features, in_features]: `pieces` stacked on the output rows of one matrix."""

    name: str
    """Its attribute in the module: 'qkv'."""
    in_features: int
    pieces: tuple[Piece, ...]
    reads: Input
    """Its input. A per-channel scale can be moved from W's columns to a norm, an output or the last one of a product. Linears
    of one layer with equal `reads` have the same input."""
    shard: Shard = "none"
    """How tensor parallelism shards it: output rows (column, as Megatron-LM calls it), input columns (row), rows of the vocabulary."""
    bias: bool = False
    experts: int | None = None
    """With E experts the weight is [E, out_features, in_features] and the bias [E, out_features]. Another whole linear of the block
    with E rows that reads what experts read is their router (`is_router`)."""
    in_heads: int | None = None
    """Number of heads that the input features are divided into; a rank takes whole heads. None: it may take any features."""
    residual: bool = False
    """Whether it writes to the residual stream: its initial weights are divided by sqrt(2 * num_layers)."""
    share: float = 1.0
    """Fraction of a sequence's tokens that are multiplied with it; with experts, the fraction of experts used for a token."""
    precise: bool = False
    """Whether its product decides something, as a router's does, so that no other part of a model may be less precise."""

    @property
    def out_features(self) -> int:
        return sum(piece.out_features for piece in self.pieces)

    def piece(self, name: str) -> Piece:
        """The piece called `name`."""
        return next(piece for piece in self.pieces if piece.name == name)

    @property
    def parts(self) -> dict[str, int]:
        """Rows of each piece by name, in order of the stacked rows; of every expert's in turn: 'experts.3.gate'."""
        if self.experts is None:
            return {piece.name: piece.out_features for piece in self.pieces}
        return {
            f"experts.{expert}.{piece.name}": piece.out_features
            for expert in range(self.experts)
            for piece in self.pieces
        }

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return (self.experts or 1) * self.out_features * (self.in_features + self.bias)

    @property
    def active_params(self) -> int:
        """Parameters used for one token; with experts fewer than all."""
        return self.num_params if self.experts is None else round(self.num_params * self.share)

    @property
    def matmuls(self) -> tuple[tuple[int, int], ...]:
        """(n_out, k_in) of the products of one token; one that only every n-th token needs counts with k_in / n."""
        if self.experts is not None:
            return ((self.out_features, self.in_features),) * round(self.experts * self.share)
        columns = round(self.in_features * self.share)
        return ((self.out_features, columns),) if columns else ()

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """`matmuls` before pieces were fused."""
        return tuple((piece.out_features, columns) for _, columns in self.matmuls for piece in self.pieces)

    def row_axis(self, piece: Piece) -> AxisKind | None:
        """What the rows of one of its pieces are; None: a whole that nothing takes parts of, such as a latent."""
        if self.residual:
            return "hidden"
        if piece.heads is not None:
            return "kv_heads" if piece.replicate else "heads"
        return "channels" if self.shard == "column" and not piece.replicate else None

    def rows(self, rank: int, num_ranks: int) -> dict[str, slice]:
        """The output rows of each piece that tensor-parallel `rank` of `num_ranks` holds."""
        if self.shard == "column":
            return {piece.name: piece.rows(rank, num_ranks, self.name) for piece in self.pieces}
        if self.shard == "vocab":
            return {piece.name: _vocabulary(piece.out_features, rank, num_ranks) for piece in self.pieces}
        return {piece.name: slice(0, piece.out_features) for piece in self.pieces}

    def columns(self, rank: int, num_ranks: int) -> slice:
        """The input features that `rank` of `num_ranks` holds."""
        if self.shard != "row":
            return slice(0, self.in_features)
        count = self.in_features if self.in_heads is None else self.in_heads
        _must_divide(count, num_ranks, self.name, "input features" if self.in_heads is None else "heads")
        width = self.in_features // num_ranks
        return slice(rank * width, (rank + 1) * width)

    def local(self, rank: int, num_ranks: int) -> LinearSpec:
        """The linear of one tensor-parallel rank.

        The bias of a row-parallel linear stays with rank 0: the ranks' outputs are summed. Raises SpecError when heads
        or features do not divide.
        """
        rows, columns = self.rows(rank, num_ranks), self.columns(rank, num_ranks)
        pieces = []
        for piece in self.pieces:
            kept = rows[piece.name].stop - rows[piece.name].start
            heads = piece.heads and max(1, piece.heads * kept // piece.out_features)
            pieces.append(replace(piece, out_features=kept, heads=heads))
        width = columns.stop - columns.start
        return replace(
            self,
            pieces=tuple(pieces),
            in_features=width,
            in_heads=self.in_heads and self.in_heads * width // self.in_features,
            bias=self.bias and (self.shard != "row" or rank == 0),
        )


@dataclass(frozen=True)
class NormSpec:
    """An RMS norm's weight [size]. The norm multiplies by weight + offset, initially 1."""

    name: str
    size: int
    offset: float = 0.0
    over: Output | None = None
    """The piece whose rows it norms all together; None: any other, such as each head alone."""
    eps: float | None = None
    """Added to the mean square; None: what the model adds (`ModelConfig.norm_eps`)."""

    @property
    def path(self) -> str:
        """Where its tensor lies in the module."""
        return f"{self.name}.weight"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def num_params(self) -> int:
        return self.size

    @property
    def matmuls(self) -> tuple[tuple[int, int], ...]:
        return ()


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter outside the linears: decays, per-head biases, position mixtures."""

    name: str
    shape: tuple[int, ...]
    initial: Initial = (0.0, INIT_STD)
    heads: int | None = None
    """Number of heads that the first axis is divided into; a tensor-parallel rank holds its heads. None: every rank holds all."""
    multiplied: bool = False
    """Whether every token is multiplied with it as with a linear [out, in]."""
    trained: bool = True
    """Whether gradients change it."""

    @property
    def path(self) -> str:
        """Where its tensor lies in the module."""
        return self.name

    @property
    def num_params(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def matmuls(self) -> tuple[tuple[int, int], ...]:
        return ((self.shape[0], self.shape[1]),) if self.multiplied else ()

    def local(self, rank: int, num_ranks: int) -> slice:
        """The entries of the first axis that `rank` of `num_ranks` holds."""
        if self.heads is None:
            return slice(0, self.shape[0])
        return Piece(self.name, self.shape[0], self.heads).rows(rank, num_ranks)


Parameter = NormSpec | ParameterSpec


def projection_in(name: str, hidden_size: int, *pieces: Piece, **options: Any) -> LinearSpec:
    """A mixer's projection of the normed hidden states into heads."""
    return LinearSpec(name, hidden_size, pieces, **{"reads": Norm("mixer_norm"), "shard": "column", **options})


def projection_out(
    hidden_size: int, num_heads: int, head_dim: int, reads: Input = Output("mixer.qkv", "v"), bias: bool = False
) -> LinearSpec:
    """A mixer's projection of all heads' outputs to the residual stream. `reads`: they are linear in the values, or `Computed`."""
    return LinearSpec(
        "out", num_heads * head_dim, (Piece("out", hidden_size),),
        reads=reads, shard="row", bias=bias, in_heads=num_heads, residual=True,
    )  # fmt: skip


def outputs_of(reads: Input) -> tuple[Output, ...]:
    """The outputs that an input is made of; none for any other."""
    if isinstance(reads, Product):
        return reads.factors
    return (reads,) if isinstance(reads, Output) else ()


def column_axis(linears: Mapping[str, LinearSpec], path: str) -> AxisKind | None:
    """What the input features of the linear at `path` of a layer with `linears` are; None: a whole, as in `LinearSpec.row_axis`."""
    linear = linears[path]
    if linear.in_heads is not None:
        return "heads"
    if isinstance(linear.reads, Stream) or (isinstance(linear.reads, Norm) and linear.reads.of_stream):
        return "hidden"
    read = ((linears[one.linear], one.piece) for one in outputs_of(linear.reads))
    kinds = {one.row_axis(one.piece(name)) for one, name in read}
    return kinds.pop() if len(kinds) == 1 else None


def each_expert(linears: Mapping[str, LinearSpec]) -> dict[str, LinearSpec]:
    """The linears of a layer with one for every expert in place of those that hold all: 'feed_forward.down' with E experts becomes
    'feed_forward.down.0' to 'feed_forward.down.{E - 1}', each of which reads its own expert's outputs."""
    found = {}
    for path, linear in linears.items():
        if linear.experts is None:
            found[path] = linear
            continue
        for expert in range(linear.experts):
            reads = _of_expert(linears, linear.reads, expert)
            found[f"{path}.{expert}"] = replace(
                linear, name=f"{linear.name}.{expert}", reads=reads, experts=None, share=1.0
            )
    return found


def is_router(linears: Mapping[str, LinearSpec], path: str) -> bool:
    """Whether the rows of the linear at `path` of a layer with `linears` are the scores of its block's experts: as many as those, made
    of what they read."""
    linear, block = linears[path], path.partition(".")[0]
    experts = [one for name, one in linears.items() if one.experts is not None and name.startswith(f"{block}.")]
    return (
        linear.experts is None
        and linear.shard == "none"
        and any((one.experts, one.reads) == (linear.out_features, linear.reads) for one in experts)
    )


def grouped_pieces(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Piece, Piece, Piece]:
    """Queries, keys and values; ranks beyond the key heads share them."""
    keys = num_kv_heads * head_dim
    return (
        Piece("q", num_heads * head_dim, num_heads),
        Piece("k", keys, num_kv_heads, replicate=True),
        Piece("v", keys, num_kv_heads, replicate=True),
    )


def _of_expert(linears: Mapping[str, LinearSpec], reads: Input, expert: int) -> Input:
    """The input of one expert's linear: outputs of linears that hold all experts, and what is computed, are those of its own."""
    if isinstance(reads, Product):
        return Product(tuple(_of_expert(linears, one, expert) for one in reads.factors))
    if isinstance(reads, Output) and linears[reads.linear].experts is not None:
        return replace(reads, linear=f"{reads.linear}.{expert}")
    return Computed(f"{reads}.{expert}") if isinstance(reads, Computed) else reads


def _vocabulary(size: int, rank: int, num_ranks: int) -> slice:
    """Equal rows for every rank but the last, which holds the rest."""
    width = -(-size // num_ranks)
    return slice(min(rank * width, size), min((rank + 1) * width, size))


def _must_divide(count: int, num_ranks: int, name: str, what: str) -> None:
    if count % num_ranks:
        raise SpecError(
            f"the {count} {what} of {name} cannot be divided among {num_ranks} tensor-parallel ranks",
            fix=f"set tensor_parallel_size to one of {', '.join(str(n) for n in range(1, count + 1) if count % n == 0)}",
        )


def dense_shapes(rows: list[int], in_features: int, *, bias: bool) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of the dense tensors of checkpoint modules with `rows` output rows each."""
    return [{"weight": (count, in_features)} | ({"bias": (count,)} if bias else {}) for count in rows]
