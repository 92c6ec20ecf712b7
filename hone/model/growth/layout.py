"""Where the entries of a wider model's tensors come from, by the declarations of its layers alone. Never imports torch.

With x a channel of the residual stream, c the copies of it, a their shares and s = sqrt(D' / (D c)) (`Axis.even`): a copy of x is s x,
so that the mean square over all D' channels is that over the D before. What writes to the stream is multiplied by s; the norm in
front of a reader by 1 / s; a reader's column by a, and where no norm stands before it by a / s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from hone.base.errors import SpecError
from hone.model.growth.axis import NEW, Axis, Flags, Floats, Integers, grouped
from hone.model.linear_spec import INIT_STD, Initial, Norm, NormSpec, Output, Piece, column_axis, outputs_of

if TYPE_CHECKING:
    from hone.model.config import ModelConfig


class Widening(Protocol):
    """A technique that widens, as `hone.model.growth.width.Width` is."""

    kind: str
    copies: ClassVar[bool]
    from_next: ClassVar[bool]

    @property
    def noise(self) -> float: ...
    def in_turn(self, size: int, grown: int) -> Integers: ...
    def axis(self, size: int, grown: int, key: str, seed: int) -> Axis: ...
    def shared(self, size: int, sources: Integers, key: str, seed: int) -> Axis: ...


class Side(NamedTuple):
    """The rows or columns of a tensor."""

    sources: Integers
    """Of each entry that of the smaller tensor, or NEW."""
    later: Flags
    """Copies that are not the first of their source."""
    factor: Floats
    """What an entry is multiplied by."""
    zero: Flags
    """New entries that are zero; others are random."""

    @classmethod
    def of(cls, axis: Axis, factor: Floats | float = 1.0, *, zero: bool = False) -> Self:
        """The entries of `axis` times `factor`; `zero`: its new ones are zero."""
        return cls(axis.sources, axis.later, np.broadcast_to(factor, axis.grown), axis.new & zero)


@dataclass(frozen=True)
class Made:
    """A tensor of the wider model: of which one of the smaller model, and of its rows and columns (None: all, as they are).

    A norm's weight is what multiplies less `offset`; where it is new that is 1.
    """

    name: str
    shape: tuple[int, ...]
    rows: Side | None = None
    columns: Side | None = None
    next_name: str | None = None
    """The tensor of the next layer, of which the rows of later copies are; None: of the same one."""
    offset: float = 0.0
    initial: Initial | None = (0.0, INIT_STD)
    """How random entries are drawn; None: they are those of a norm."""


class Layout:
    """The tensors of `large`, a wider `small`, as `how` widens it; random numbers are those of `seed`."""

    def __init__(self, small: ModelConfig, large: ModelConfig, how: Widening, seed: int) -> None:
        self.small, self.large, self.how, self.seed = small, large, how, seed
        self.hidden = how.axis(small.hidden_size, large.hidden_size, "hidden", seed)
        self._heads: dict[int, tuple[Axis | None, Axis | None]] = {}

    def check(self) -> None:
        """Raises SpecError where a declaration does not say how a tensor grows."""
        for index in range(self.small.num_layers):
            self.layer(index)

    def ends(self) -> dict[str, Made]:
        """The tensors outside the layers, by name."""
        small, large, axis = self.small, self.large, self.hidden
        scale = small.embedding_multiplier / large.embedding_multiplier
        table, factor = (large.vocab_size, large.hidden_size), 1 / axis.even
        columns = Side.of(axis, scale * axis.even, zero=True)
        found = {"model.embed_tokens.weight": Made("model.embed_tokens.weight", table, columns=columns)}
        if (
            large.tie_embeddings
        ):  # the head's columns are the embedding's: the norm has the shares, and takes the factor back
            factor = np.where(axis.new, factor, axis.shares / axis.even**2 / scale)
        else:
            found["lm_head.weight"] = Made("lm_head.weight", table, columns=Side.of(axis, axis.shares))
        found["model.norm.weight"] = self._norm("model.norm.weight", axis, factor)
        return found

    def layer(self, index: int) -> dict[str, Made]:
        """The tensors of layer `index`, by name."""
        found: dict[str, Made] = {}
        for path in self.large.linears(index):
            found |= self._linear(index, path)
        layer, names = self.large.layers[index], self.small.singles(index)
        outer = {f"{name}.weight" for block in ("mixer", "feed_forward") for name in layer.norm_names(block)}
        for path, made in self.large.singles(index).items():
            if path in outer:  # a norm of a block's output writes to the stream: its weights stay
                factor = 1.0 if path.endswith("_post_norm.weight") else 1 / self.hidden.even
                found[made] = self._norm(names[path], self.hidden, factor)
            else:
                found[made] = self._single(index, path, names[path])
        return found

    def _linear(self, index: int, path: str) -> dict[str, Made]:
        """The checkpoint modules of one linear, each with the rows of one or several pieces."""
        small, large = self.small.linears(index)[path], self.large.linears(index)[path]
        columns, following = self._columns(index, path), self._next(index)
        sides = {piece.name: self._rows(index, path, number) for number, piece in enumerate(small.pieces)}
        parts = [(sides[part.rpartition(".")[2]], rows) for part, rows in small.parts.items()]
        modules = self.small.modules(index, path).items(), self.large.modules(index, path).items()
        later = [None] * len(modules[0]) if following is None else list(self.small.modules(following, path))
        found: dict[str, Made] = {}
        for (name, count), (made, grown), next_name in zip(*modules, later, strict=True):
            inside = []
            while sum(rows for _, rows in inside) < count:
                inside.append(parts.pop(0))
            side, beside = _joined(inside), next_name and f"{next_name}.weight"
            found[f"{made}.weight"] = Made(f"{name}.weight", (grown, large.in_features), side, columns, beside)
            if large.bias:  # that of a new row is zero, as biases are at first
                side = side and side._replace(zero=side.sources == NEW)
                beside = next_name and f"{next_name}.bias"
                found[f"{made}.bias"] = Made(f"{name}.bias", (grown,), side, next_name=beside)
        return found

    def _rows(self, index: int, path: str, number: int) -> Side | None:
        """The rows of piece `number` of a linear; None where they stay."""
        small = self.small.linears(index)[path]
        if small.residual:
            return None if self.hidden.same else Side.of(self.hidden, self.hidden.even, zero=True)
        axis = self._piece(index, path, number)
        if axis is None:
            return None
        if self._normed(index, path, small.pieces[number]):
            return Side.of(axis, axis.even, zero=True)  # as hidden channels are: the mean square stays
        return Side.of(axis)

    def _piece(self, index: int, path: str, number: int) -> Axis | None:
        """The axis of a piece's rows; None where they stay."""
        linear = self.small.linears(index)[path]
        small, large = linear.pieces[number], self.large.linears(index)[path].pieces[number]
        axis = self._axes(index)[small.replicate]
        if small.heads is not None and axis is not None and (axis.size, axis.grown) == (small.heads, large.heads):
            return None if axis.same else axis.blocks(small.out_features // small.heads)
        if small.out_features == large.out_features:
            return None
        if small.heads is None and not small.replicate and linear.shard == "column":
            block = path.partition(".")[0]
            return self.how.axis(small.out_features, large.out_features, f"layers.{index}.{block}", self.seed)
        raise self._unknown(index, f"{path}.{small.name}", small.out_features, large.out_features)

    def _columns(self, index: int, path: str) -> Side | None:
        """The columns of a linear, by what it reads; None where they stay."""
        linears = self.small.linears(index)
        small, large = linears[path], self.large.linears(index)[path]
        if column_axis(linears, path) == "hidden":
            if self.hidden.same:
                return None
            return Side.of(
                self.hidden, self.hidden.shares / (1.0 if isinstance(small.reads, Norm) else self.hidden.even)
            )
        queries = self._axes(index)[0]
        if queries is not None and (queries.size, queries.grown) == (small.in_heads, large.in_heads):
            inner = queries.blocks(small.in_features // queries.size)
            return None if queries.same else Side.of(inner, inner.shares, zero=True)
        if small.in_features == large.in_features:
            return None
        axes = [
            self._piece(index, one.linear, linears[one.linear].pieces.index(linears[one.linear].piece(one.piece)))
            for one in outputs_of(small.reads)
        ]
        first = axes[0] if axes else None
        if first is None or any(one is None or not np.array_equal(one.sources, first.sources) for one in axes):
            raise self._unknown(index, f"{path}, which reads '{small.reads}',", small.in_features, large.in_features)
        return Side.of(first, first.shares, zero=True)

    def _axes(self, index: int) -> tuple[Axis | None, Axis | None]:
        """Query heads and key heads of layer `index`; None where it declares none."""
        if index not in self._heads:
            self._heads[index] = self._made_axes(index)
        return self._heads[index]

    def _made_axes(self, index: int) -> tuple[Axis | None, Axis | None]:
        source = self.small.kv_source(index)
        before, after = _heads(self.small, index, keys=True), _heads(self.large, index, keys=True)
        keys = None if source is None else self._axes(source)[1]
        if before is not None and after is not None:
            keys = Axis.of(before, self.how.in_turn(before, after))
        before, after = _heads(self.small, index, keys=False), _heads(self.large, index, keys=False)
        if before is None or after is None:
            return None, keys
        key = f"layers.{index}.heads"
        if keys is None:
            return self.how.axis(before, after, key, self.seed), None
        found = grouped(keys.sources, (before, after), (keys.size, keys.grown), copies=self.how.copies)
        if found is None:
            raise SpecError(
                f"{self.how.kind}: in layers.{index} {before // keys.size} query heads share a key head, and of {after} query heads "
                f"{after // keys.grown} would: some of them have no place beside their own key head",
                fix="give a larger num_heads or a smaller num_kv_heads, or use kind: net2net, which copies key heads in turn",
            )
        return self.how.shared(before, found, key, self.seed), keys

    def _normed(self, index: int, path: str, piece: Piece) -> bool:
        """Whether one norm is over all rows of a piece."""
        parameters = self.small.parameters(index).values()
        return any(isinstance(one, NormSpec) and one.over == Output(path, piece.name) for one in parameters)

    def _single(self, index: int, path: str, name: str) -> Made:
        """A norm inside a block, or another parameter outside its linears."""
        small, large = self.small.parameters(index)[path], self.large.parameters(index)[path]
        if isinstance(small, NormSpec):
            if small.over is not None:
                linear = self.small.linears(index)[small.over.linear]
                axis = self._piece(index, small.over.linear, linear.pieces.index(linear.piece(small.over.piece)))
                if axis is not None:
                    return self._norm(name, axis, 1 / axis.even)
        else:
            queries = self._axes(index)[0]
            if large.heads is not None and queries is not None and not queries.same:
                axis = queries.blocks(small.shape[0] // queries.size)
                return Made(name, large.shape, Side.of(axis), initial=large.initial)
        if small.shape != large.shape:
            raise self._unknown(index, path, small.shape, large.shape)
        return Made(name, large.shape)

    def _norm(self, name: str, axis: Axis, factor: Floats | float) -> Made:
        side = None if axis.same else Side.of(axis, factor)
        return Made(name, (axis.grown,), side, offset=self.large.norm_offset, initial=None)

    def _next(self, index: int) -> int | None:
        """The nearest later layer whose linears are alike; None where rows of copies are the layer's own."""
        own, count = self.small.linears(index), self.small.num_layers
        later = range(index + 1, count) if self.how.from_next else range(0)
        return next((one for one in later if self.small.linears(one) == own), None)

    def _unknown(self, index: int, what: str, before: Any, after: Any) -> SpecError:
        layer = self.small.layers[index]
        return SpecError(
            f"{self.how.kind}: layers.{index}.{what} would grow from {before} to {after}, and '{layer.mixer.kind}' with "
            f"'{layer.feed_forward.kind}' does not declare how that leaves its result as it is",
            fix="leave that size as it is, or grow the depth: kind: stack or block_expansion",
        )


def _heads(config: ModelConfig, index: int, *, keys: bool) -> int | None:
    """The heads that the pieces of a layer's linears declare, those of its keys or the others; None: none, or several numbers."""
    pieces = (piece for linear in config.linears(index).values() for piece in linear.pieces)
    found = {piece.heads for piece in pieces if piece.heads is not None and piece.replicate == keys}
    return found.pop() if len(found) == 1 else None


def _joined(parts: list[tuple[Side | None, int]]) -> Side | None:
    """The rows of pieces that are stacked, each with its number of rows before."""
    if all(side is None for side, _ in parts):
        return None
    sides, begin = [], 0
    for side, count in parts:
        side = Side.of(Axis.of(count, np.arange(count))) if side is None else side
        sides.append(side._replace(sources=np.where(side.sources == NEW, NEW, side.sources + begin)))
        begin += count
    return Side(*(np.concatenate(column) for column in zip(*sides, strict=True)))
