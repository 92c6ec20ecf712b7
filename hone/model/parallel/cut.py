"""Which entries of a checkpoint's tensors a rank needs: rows and columns of a matrix, in any storage layout.

A layout says the shape of its tensors for any number of rows and columns. So an axis whose length grows with the rows
holds rows, evenly if it grows in proportion, and a range of rows is the same part of that axis; likewise columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hone.base.errors import SpecError
from hone.model.linear_spec import LinearSpec

Shapes = dict[str, tuple[int, ...]]
ShapesOf = Callable[[int, int], Shapes]
"""(rows, columns) of a checkpoint module -> the shape of each of its tensors by suffix; -1 is any length."""

PROBE = 32
"""Times as large as the matrix: rounding up to whole words, groups or blocks then shows in the shapes."""


class Cut(NamedTuple):
    """What a rank needs of one checkpoint module [num_rows, num_columns]."""

    module: str
    num_rows: int
    rows: tuple[slice, ...]
    """Ranges of rows, to be stacked."""
    num_columns: int
    columns: slice

    @property
    def local_rows(self) -> int:
        return sum(one.stop - one.start for one in self.rows)

    @property
    def local_columns(self) -> int:
        return self.columns.stop - self.columns.start


def cuts(linear: LinearSpec, modules: dict[str, int], rank: int, num_ranks: int) -> list[Cut]:
    """What `rank` needs of each of the checkpoint modules of `linear` (their names and rows, in order)."""
    own, columns = linear.rows(rank, num_ranks), linear.columns(rank, num_ranks)
    ranges, begin = [], 0
    for part, count in linear.parts.items():
        inside = own[part.rpartition(".")[2]]
        ranges.append((begin, begin + count, slice(begin + inside.start, begin + inside.stop)))
        begin += count
    found, first = [], 0
    for module, count in modules.items():
        rows = [
            slice(inside.start - first, inside.stop - first)
            for start, stop, inside in ranges
            if first <= start and stop <= first + count
        ]
        found.append(Cut(module, count, tuple(rows), linear.in_features, columns))
        first += count
    return found


def pieces_of(cut: Cut, shapes: ShapesOf, suffix: str, num_ranks: int) -> list[tuple[slice, ...]] | None:
    """The parts of tensor `suffix` that make the rank's, to be stacked on the axis of rows (`row_axis`); None: all of it.

    Raises SpecError when a range begins or ends inside a word, group or block.
    """
    rows, columns = cut.num_rows, cut.num_columns
    whole = shapes(rows, columns)[suffix]
    by_row = _axes(whole, shapes(PROBE * rows, columns)[suffix])
    by_column = _axes(whole, shapes(rows, PROBE * columns)[suffix])
    cuts_rows = cut.local_rows != rows
    cuts_columns = cut.local_columns != columns
    if not (cuts_rows or cuts_columns):
        return None
    if whole == (-1,) or (cuts_columns and set(by_row) & set(by_column)):
        raise _indivisible(cut, suffix, "its layout keeps rows and columns in one run", num_ranks)
    index = [slice(None)] * len(whole)
    if cuts_columns:
        for axis in by_column:
            grown = shapes(rows, PROBE * columns)[suffix][axis]
            index[axis] = _scaled(cut, cut.columns, columns, whole[axis], grown, suffix, num_ranks)
    if not cuts_rows or not by_row:
        return [tuple(index)] if any(one != slice(None) for one in index) else None
    found = []
    for one in cut.rows:
        for axis in by_row:
            index[axis] = _scaled(
                cut, one, rows, whole[axis], shapes(PROBE * rows, columns)[suffix][axis], suffix, num_ranks
            )
        found.append(tuple(index))
    return found


def row_axis(cut: Cut, shapes: ShapesOf, suffix: str) -> int:
    """The axis of tensor `suffix` that holds rows."""
    axes = _axes(shapes(cut.num_rows, cut.num_columns)[suffix], shapes(PROBE * cut.num_rows, cut.num_columns)[suffix])
    return axes[0] if axes else 0


def _axes(whole: tuple[int, ...], grown: tuple[int, ...]) -> list[int]:
    return [axis for axis, (small, large) in enumerate(zip(whole, grown, strict=True)) if small != large]


def _scaled(cut: Cut, part: slice, count: int, length: int, grown: int, suffix: str, num_ranks: int) -> slice:
    """The entries of an axis of `length`, `grown` for PROBE times as many, that hold `part` of `count` rows or columns."""
    begin, end = part.start * length, part.stop * length
    if grown != PROBE * length or begin % count or end % count:
        raise _indivisible(cut, suffix, f"its {length} entries hold {count} rows or columns", num_ranks)
    return slice(begin // count, end // count)


def _indivisible(cut: Cut, suffix: str, why: str, num_ranks: int) -> SpecError:
    what = f"rows {_shown(cut.rows)}" if cut.local_rows != cut.num_rows else f"columns {_shown((cut.columns,))}"
    return SpecError(
        f"{cut.module}.{suffix} cannot be divided among {num_ranks} tensor-parallel ranks at {what}: {why}",
        fix="set tensor_parallel_size to a smaller divisor, use pipeline_parallel_size, or a folder whose groups of weights end "
        "where the ranks' rows and columns do",
    )


def _shown(parts: tuple[slice, ...]) -> str:
    return ", ".join(f"{one.start}...{one.stop - 1}" for one in parts)
