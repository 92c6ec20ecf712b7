"""Interval arithmetic: evaluates a mask's rule for whole tiles at once and makes the lists of tiles that kernels read.

A rule evaluated on `Interval`s instead of numbers returns a `Truth`: whether some pair of the tile can be kept and whether
all must be. Results are conservative: a wholly kept tile may be classified as partial, a tile with a kept pair never as
empty. Bounds are int32 tensors that broadcast against each other ([..., num_q_tiles, 1] and [..., 1, num_k_tiles]), so the
host never waits for the device. Moore 1966, Interval Analysis.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import SpecError

FAR_LONGER = 3
"""A row of a list that is this many times longer than the average is started first."""


@dataclass(frozen=True, eq=False)
class Truth:
    """Whether a condition `can` hold for some element and whether it `must` hold for every one; bool tensors (or bools)."""

    can: Any
    must: Any

    def __and__(self, other: Truth | bool) -> Truth:
        other = truth(other)
        return Truth(self.can & other.can, self.must & other.must)

    def __or__(self, other: Truth | bool) -> Truth:
        other = truth(other)
        return Truth(self.can | other.can, self.must | other.must)

    def __invert__(self) -> Truth:
        return Truth(_not(self.must), _not(self.can))

    __rand__ = __and__
    __ror__ = __or__


def truth(value: Truth | bool) -> Truth:
    """`value`, or a constant as a Truth."""
    return value if isinstance(value, Truth) else Truth(bool(value), bool(value))


def _not(value: Any) -> Any:
    return not value if isinstance(value, bool) else ~value


class Interval:
    """Every integer from `low` to `high`, both included; tensors or ints."""

    __slots__ = ("high", "low")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, low: Any, high: Any) -> None:
        self.low, self.high = low, high

    def __add__(self, other: Interval | int) -> Interval:
        other = _interval(other)
        return Interval(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __sub__(self, other: Interval | int) -> Interval:
        other = _interval(other)
        return Interval(self.low - other.high, self.high - other.low)

    def __rsub__(self, other: int) -> Interval:
        return Interval(other - self.high, other - self.low)

    def __mul__(self, other: Interval | int) -> Interval:
        if isinstance(other, int):
            low, high = self.low * other, self.high * other
            return Interval(low, high) if other >= 0 else Interval(high, low)
        products = torch.broadcast_tensors(
            self.low * other.low, self.low * other.high, self.high * other.low, self.high * other.high
        )
        return Interval(torch.stack(products).amin(0), torch.stack(products).amax(0))

    def __floordiv__(self, other: int) -> Interval:
        _check_divisor(other)
        return Interval(self.low // other, self.high // other)

    def __mod__(self, other: int) -> Interval:
        _check_divisor(other)
        same = self.low // other == self.high // other
        return Interval(torch.where(same, self.low % other, 0), torch.where(same, self.high % other, other - 1))

    def __lt__(self, other: Interval | int) -> Truth:
        other = _interval(other)
        return Truth(self.low < other.high, self.high < other.low)

    def __le__(self, other: Interval | int) -> Truth:
        other = _interval(other)
        return Truth(self.low <= other.high, self.high <= other.low)

    def __gt__(self, other: Interval | int) -> Truth:
        other = _interval(other)
        return Truth(self.high > other.low, self.low > other.high)

    def __ge__(self, other: Interval | int) -> Truth:
        other = _interval(other)
        return Truth(self.high >= other.low, self.low >= other.high)

    def __eq__(self, other: Interval | int) -> Truth:  # type: ignore[override]
        other = _interval(other)
        return Truth(
            (self.low <= other.high) & (self.high >= other.low),
            (self.low == other.high) & (self.high == other.low),
        )

    def __ne__(self, other: Interval | int) -> Truth:  # type: ignore[override]
        return ~(self == other)

    __radd__ = __add__
    __rmul__ = __mul__


def _interval(value: Interval | int) -> Interval:
    return value if isinstance(value, Interval) else Interval(value, value)


def _check_divisor(value: Any) -> None:
    if not isinstance(value, int) or value <= 0:
        raise SpecError(
            f"a mask's rule may divide by positive constants only, not by {value!r}",
            fix="give the divisor as an entry of the mask's `params`, an int of at least 1",
        )


def tile_places(length: int, block: int, shift: int, device: torch.device) -> Interval:
    """The positions of each tile of `block` out of `length` (the last tile shorter), plus `shift`: bounds [num_tiles]."""
    low = torch.arange(0, length, block, device=device, dtype=torch.int32)
    return Interval(low + shift, (low + (block - 1)).clamp(max=length - 1) + shift)


def tile_range(values: Tensor, block: int) -> Interval:
    """Smallest and largest of `values` [..., length] in each tile of `block`: bounds [..., num_tiles]."""
    missing = -values.shape[-1] % block
    if missing:  # the last value again changes neither bound
        values = torch.cat((values, values[..., -1:].expand(*values.shape[:-1], missing)), -1)
    tiles = values.unflatten(-1, (-1, block))
    return Interval(tiles.amin(-1), tiles.amax(-1))


def resolve_rule(name: str) -> Callable[..., Any]:
    """The function named 'module:qualname'. SpecError unless it is at the top of a module (a lambda, a nested function)."""
    module, _, path = name.partition(":")
    if "<" in path:
        raise SpecError(
            f"the mask's rule {path} of {module} cannot be compiled into a kernel: it is defined inside a function",
            fix="define it with `def` at the top of a module, its constants in `params`, its tensors in q_data and k_data",
        )
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@torch.library.custom_op("hone::tile_lists", mutates_args=())
def tile_lists(
    q_data: Tensor | None,
    k_data: Tensor | None,
    table: Tensor | None,
    rule: str,
    params: Sequence[int],
    block: int,
    seq_q: int,
    seq_k: int,
    block_m: int,
    block_n: int,
    transposed: bool,
    device: torch.device,
) -> list[Tensor]:
    """The lists of `Tiles`: kv_count, kv_index, kv_partial, kv_turns and, if `transposed`, q_count, q_index, q_partial."""
    can, must = classify(
        q_data, k_data, table, resolve_rule(rule), tuple(params), block, seq_q, seq_k, block_m, block_n, device
    )
    num_m, num_n = can.shape[-2:]
    if seq_k % block_n:
        must = must & (torch.arange(num_n, device=device) < num_n - 1)
    lists = _listed(can, must)
    lists.append(_turns(*lists))
    if transposed:
        if seq_q % block_m:
            must = must & (torch.arange(num_m, device=device) < num_m - 1)[:, None]
        lists += _listed(can.mT, must.mT)
    return lists


@tile_lists.register_fake
def _(q_data, k_data, table, rule, params, block, seq_q, seq_k, block_m, block_n, transposed, device) -> list[Tensor]:
    num_m, num_n = -(-seq_q // block_m), -(-seq_k // block_n)
    shapes = [made.shape[:2] for made in (q_data, k_data, table) if made is not None]
    outer = torch.broadcast_shapes((1, 1), *shapes)
    shapes = [(num_m,), (num_m, num_n), (num_m,), (num_m, 4)]
    if transposed:
        shapes += [(num_n,), (num_n, num_m), (num_n,)]
    return [torch.empty((*outer, *shape), dtype=torch.int32, device=device) for shape in shapes]


def classify(
    q_data: Tensor | None,
    k_data: Tensor | None,
    table: Tensor | None,
    rule: Callable[..., Any],
    params: tuple[int, ...],
    block: int,
    seq_q: int,
    seq_k: int,
    block_m: int,
    block_n: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """For every tile, whether some pair can be kept and whether all are: bool [B', H', nM, nN]; ignores the edges of q and k."""
    q = _column(tile_places(seq_q, block_m, seq_k - seq_q, device))
    k = tile_places(seq_k, block_n, 0, device)
    q_range: Any = 0
    k_range: Any = 0
    if q_data is not None:
        q_range = _column(tile_range(q_data.expand(-1, -1, seq_q), block_m))
    if k_data is not None:
        k_range = tile_range(k_data.expand(-1, -1, seq_k), block_n)
        k_range = Interval(k_range.low[..., None, :], k_range.high[..., None, :])
    kept = truth(rule(q, k, q_range, k_range, params))
    shape = (1, 1, -(-seq_q // block_m), -(-seq_k // block_n))
    can, must = (torch.as_tensor(part, device=device) for part in (kept.can, kept.must))
    if table is not None:
        wide = table.repeat_interleave(block // block_m, -2).repeat_interleave(block // block_n, -1)
        wide = wide[..., : shape[2], : shape[3]]
        can, must = can & wide, must & wide
    shape = torch.broadcast_shapes(can.shape, shape)
    return can.expand(shape), must.expand(shape)


def _column(interval: Interval) -> Interval:
    return Interval(interval.low[..., :, None], interval.high[..., :, None])


def _listed(can: Tensor, must: Tensor) -> list[Tensor]:
    """(count, index, partial) of the rows of [B', H', rows, columns]: the tiles that can be kept, the partly kept first.

    Both kinds run from right to left: under a causal rule every query then attends to a key of the first tile.
    """
    can, must = can.flip(-1), must.flip(-1)
    partial = can & ~must
    whole = can & must
    num_partial = partial.sum(-1, dtype=torch.int32)
    place = torch.where(
        partial,
        partial.cumsum(-1, dtype=torch.int32) - 1,
        num_partial[..., None] + whole.cumsum(-1, dtype=torch.int32) - 1,
    )
    columns = can.shape[-1]
    place = torch.where(can, place, columns).long()  # tiles that are never kept all go to one place past the end
    index = torch.zeros((*can.shape[:-1], columns + 1), dtype=torch.int32, device=can.device)
    numbers = torch.arange(columns - 1, -1, -1, dtype=torch.int32, device=can.device).expand(can.shape)
    index.scatter_(-1, place, numbers)
    count = can.sum(-1, dtype=torch.int32)
    return [count, index[..., :columns].contiguous(), num_partial]


def _turns(count: Tensor, index: Tensor, partial: Tensor) -> Tensor:
    """(number, count, partial, first column) of every row in the best order of execution; [B', H', rows, 4].

    Rows far longer than the average come first, the longest of them before all, so that a launch does not end with one
    program busy. Then from the last to the first: neighbours share keys in L2, and under a causal mask the first are the
    shortest.
    """
    rows = count.shape[-1]
    numbers = torch.arange(rows, dtype=torch.int32, device=count.device)
    length = count * rows
    far = length > FAR_LONGER * count.sum(-1, keepdim=True)
    turn = (torch.where(far, length, 0) + numbers).argsort(-1, descending=True)
    first = index[..., 0] if index.shape[-1] else torch.zeros_like(count)
    records = torch.stack((numbers.expand_as(count), count, partial, first), -1)
    return records.gather(-2, turn[..., None].expand(records.shape))
