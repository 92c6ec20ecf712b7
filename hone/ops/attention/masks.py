"""Attention masks: a mask is one plain Python function of two positions, which every backend uses.

The reference runs it on index tensors, kernels compile it, FlexAttention takes it (`as_flex`), and evaluated on intervals
it tells which tiles of pairs are never, partly or wholly kept (`Mask.tiles`), so no S x S tensor is made for a kernel.

A rule may use only + - * // % comparisons & | ~, and // and % only on non-negative numbers, with entries of `params` as divisors.

Legend: B batch, H query heads, Sq and Sk the queries' and keys' sequence lengths, nM and nN the numbers of their tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.attention.intervals import resolve_rule, tile_lists

Rule = Callable[[Any, Any, Any, Any, Any], Any]
"""(q, k, q_data, k_data, params) -> keep. q is the query's position among the keys: i + Sk - Sq for query i of Sq."""

_KEPT_SHAPES = 16
"""Number of shapes whose tile lists a mask caches before it evicts the oldest."""


@dataclass(frozen=True, eq=False)
class Mask:
    """A rule, its constants and its data.

    `q_data` int32 [B or 1, H or 1, Sq or 1] and `k_data` (Sk) pass one number per query and one per key to the rule (0 when
    None). With `table` bool [B or 1, H or 1, nq, nk] query i attends to key j only where table[..., i // block, j // block].
    `params` are compiled into kernels; values that change often belong in the data. Tensors must not change after use: tile
    lists made from them are cached, and a CUDA graph that used them needs a reference to the mask.
    """

    rule: Rule
    params: tuple[int, ...] = ()
    q_data: Tensor | None = None
    k_data: Tensor | None = None
    table: Tensor | None = None
    block: int = 0
    name: str = field(init=False)
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _name_of(self.rule))
        for label, data in (("q_data", self.q_data), ("k_data", self.k_data)):
            if data is not None and (data.dim() != 3 or data.dtype != torch.int32):
                said = f"a mask's {label} is int32 [B, H, S], not {str(data.dtype)[6:]} of shape {list(data.shape)}"
                raise SpecError(said, fix="give [B or 1, H or 1, S or 1] with .int(), None for no data")
        if self.table is not None:
            if self.table.dim() != 4 or self.table.dtype != torch.bool:
                said = f"a mask's table is bool [B, H, nq, nk], not {self.table.dtype} {list(self.table.shape)}"
                raise SpecError(said, fix="make the table with .bool() and the mask with block_sparse")
            if self.block < 16 or self.block & (self.block - 1):
                said = f"a table's block is a power of two from 16, not {self.block}"
                raise SpecError(said, fix="give block=64, or 128 for the fastest kernels, and a table of such blocks")

    @property
    def is_full(self) -> bool:
        """Whether every query attends to every key."""
        return self.rule is _all and self.table is None

    @property
    def is_causal(self) -> bool:
        """Whether every query attends to exactly the keys up to its own position."""
        return self.rule is _causal and self.table is None

    def dense(self, seq_q: int, seq_k: int, device: torch.device | str) -> Tensor:
        """The mask pair by pair, True where the query attends to the key: bool [B or 1, H or 1, Sq, Sk]. For references and small sizes."""
        q = torch.arange(seq_k - seq_q, seq_k, device=device)[:, None]
        k = torch.arange(seq_k, device=device)[None, :]
        q_data = 0 if self.q_data is None else self.q_data[..., :, None]
        k_data = 0 if self.k_data is None else self.k_data[..., None, :]
        keep = torch.as_tensor(self.rule(q, k, q_data, k_data, self.params), device=device)
        if self.table is not None:
            rows = torch.arange(seq_q, device=device) // self.block
            columns = torch.arange(seq_k, device=device) // self.block
            keep = keep & self.table[..., rows[:, None], columns]
        return keep.expand(torch.broadcast_shapes(keep.shape, (1, 1, seq_q, seq_k)))

    def kept_dense(self, seq_q: int, seq_k: int, device: torch.device) -> Tensor:
        """`dense`, cached for the next layer; only the last size is kept, because it is large and a mask may be long-lived."""
        for old in [key for key in self._kept if key[0] == "dense"][:-1]:
            del self._kept[old]
        return self._keep(("dense", seq_q, seq_k, device), lambda: self.dense(seq_q, seq_k, device))

    def tiles(
        self, seq_q: int, seq_k: int, block_m: int, block_n: int, device: torch.device, transposed: bool = False
    ) -> Tiles:
        """The mask in tiles of block_m queries by block_n keys; `transposed` adds the lists that a backward pass needs.

        Cached for the next call of these sizes; lists made inside a CUDA graph are never used outside of it.
        """
        analytic = self.is_full or self.is_causal
        lists: list[Tensor] = []
        data: tuple[Tensor | None, Tensor | None] = (None, None)
        if not analytic:
            self.check_sizes(seq_q, seq_k, block_m, block_n)
            key = (seq_q, seq_k, block_m, block_n, device, transposed)
            make = self._lists_maker(*key)
            lists = make() if torch.compiler.is_compiling() else self._keep(key, make)
            data = _whole_length(self.q_data, seq_q), _whole_length(self.k_data, seq_k)
        return Tiles(
            self.name, self.params, *data, self.is_causal, self.is_full, seq_q, seq_k, block_m, block_n, *lists
        )

    def check_sizes(self, seq_q: int, seq_k: int, block_m: int = 16, block_n: int = 16) -> None:
        """Raises SpecError for sizes that do not match the data or the table."""
        for label, data, length in (("q_data", self.q_data, seq_q), ("k_data", self.k_data, seq_k)):
            if data is not None and data.shape[-1] not in (1, length):
                said = f"the mask's {label} is for {data.shape[-1]} positions, not for {length}"
                raise SpecError(said, fix=f"build the mask from tensors of {length} positions")
        if self.rule is _since and seq_q != seq_k:
            said = f"documents need one sequence, not {seq_q} queries over {seq_k} keys"
            raise SpecError(said, fix="give as many queries as keys, or a causal mask over one document's keys")
        if self.table is not None:
            want = (-(-seq_q // self.block), -(-seq_k // self.block))
            if tuple(self.table.shape[-2:]) != want:
                said = f"the mask's table has {list(self.table.shape[-2:])} blocks, not {list(want)}"
                raise SpecError(said, fix=f"make it for {seq_q} x {seq_k} pairs in blocks of {self.block}")
            if self.block % block_m or self.block % block_n:
                said = f"tiles of {block_m} x {block_n} do not divide the table's blocks of {self.block}"
                raise SpecError(said, fix="leave backend out, or make the table of larger blocks")

    def _lists_maker(
        self, seq_q: int, seq_k: int, block_m: int, block_n: int, device: torch.device, transposed: bool
    ) -> Callable[[], list[Tensor]]:
        own = (self.q_data, self.k_data, self.table, self.name, list(self.params), self.block)
        return lambda: tile_lists(*own, seq_q, seq_k, block_m, block_n, transposed, device)

    def _keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            made = make()
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return made  # its memory belongs to the graph
            while len(self._kept) >= _KEPT_SHAPES:
                oldest = next((old for old, (_, pinned) in self._kept.items() if not pinned), None)
                if oldest is None:
                    break
                del self._kept[oldest]
            self._kept[key] = (made, False)
        made, pinned = self._kept[key]
        if not pinned and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._kept[key] = (made, True)  # the graph reads it from now on
        return made


@dataclass(frozen=True)
class Tiles:
    """A mask in the form of kernels: its rule by name, its data, and for each tile of queries its non-empty tiles of keys.

    `causal` and `full` masks have no lists: their tiles follow by arithmetic. Else kv_index [B', H', nM, nN] starts with the
    kv_partial [B', H', nM] partly kept tiles (rule and edges are checked for every pair), then come the wholly kept ones;
    kv_count counts both, later entries are undefined. kv_turns [B', H', nM, 4] are (tile, count, partial, first of its index)
    in the best order of execution. q_* are the same as kv_* for each tile of keys: q_index [B', H', nN, nM]. B', H' are B, H
    or 1. int32, contiguous. Query i has position i + `offset`, the rule's argument q. A tile that reaches past the last key
    is never "wholly kept", nor, in the q_* lists, one that reaches past the last query.
    """

    rule: str
    params: tuple[int, ...]
    q_data: Tensor | None
    k_data: Tensor | None
    causal: bool
    full: bool
    seq_q: int
    seq_k: int
    block_m: int
    block_n: int
    kv_count: Tensor | None = None
    kv_index: Tensor | None = None
    kv_partial: Tensor | None = None
    kv_turns: Tensor | None = None
    q_count: Tensor | None = None
    q_index: Tensor | None = None
    q_partial: Tensor | None = None

    @property
    def offset(self) -> int:
        """The position of query 0 among the keys."""
        return self.seq_k - self.seq_q

    @property
    def lists(self) -> list[Tensor]:
        """The lists that are not None, in the order of the fields."""
        ahead = (self.kv_count, self.kv_index, self.kv_partial, self.kv_turns)
        return [made for made in (*ahead, self.q_count, self.q_index, self.q_partial) if made is not None]

    def triton_rule(self) -> Any:
        """The rule as a Triton function: a constexpr argument of a kernel, called as rule(q, k, q_data, k_data, params)."""
        return _triton_rule(self.rule)

    def gluon_rule(self) -> Any:
        """The rule as a Gluon function."""
        return gluon_function(self.rule)


@torch.compiler.assume_constant_result
def _name_of(rule: Rule) -> str:
    return f"{rule.__module__}:{rule.__qualname__}"


def outer_strides(made: Tensor | None) -> tuple[int, int]:
    """Strides of the first two axes of a list or of data; 0 along an axis of size 1 and for None."""
    if made is None:
        return 0, 0
    return (made.stride(0) if made.shape[0] > 1 else 0, made.stride(1) if made.shape[1] > 1 else 0)


@cache
def _triton_rule(name: str) -> Any:
    import triton

    from hone.ops.compat import INTERPRETED

    # The interpreter runs plain Python functions; a compiled one would make the rule's module import Triton.
    return resolve_rule(name) if INTERPRETED else triton.jit(resolve_rule(name))


@cache
def gluon_function(name: str) -> Any:
    """The function named 'module:name', compiled by Gluon."""
    from triton.experimental import gluon

    return gluon.jit(resolve_rule(name))


def _whole_length(data: Tensor | None, length: int) -> Tensor | None:
    return None if data is None else data.expand(-1, -1, length).contiguous()


def as_flex(mask: Mask, seq_q: int, seq_k: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as FlexAttention's mask_mod(b, h, q_index, kv_index), for create_block_mask."""
    rule, params, offset = mask.rule, mask.params, seq_k - seq_q

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        keep = rule(q + offset, k, _looked_up(mask.q_data, b, h, q), _looked_up(mask.k_data, b, h, k), params)
        if mask.table is not None:
            table, block = mask.table, mask.block
            keep = keep & table[b if len(table) > 1 else 0, h if table.shape[1] > 1 else 0, q // block, k // block]
        return keep

    return mask_mod


def _looked_up(data: Tensor | None, b: Tensor, h: Tensor, place: Tensor) -> Any:
    if data is None:
        return 0
    return data[b if len(data) > 1 else 0, h if data.shape[1] > 1 else 0, place if data.shape[2] > 1 else 0]


# Rules: plain functions of numbers, defined at the top of a module so that kernels can compile them.


def _all(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return k >= 0


def _causal(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return q >= k


def _band(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q - k <= params[0]) & (k - q <= params[1])


def _window_with_sinks(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) & ((q - k < params[0]) | (k < params[1]))


def _prefix(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) | (k < q_data)


def _same_document(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return q_data == k_data


def _since(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) & (k >= q_data)


def _causal_from(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) & (k >= q_data)


def _from(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return k >= q_data


def _longformer(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q - k <= params[0]) & (k - q <= params[1]) | (q_data == 1) | (k_data == 1)


def _longformer_causal(q, k, q_data, k_data, params):  # type: ignore[no-untyped-def]
    return (q >= k) & ((q - k <= params[0]) | (q_data == 1) | (k_data == 1))


FULL = Mask(_all)
"""Every query attends to every key."""

CAUSAL = Mask(_causal)
"""A query attends to the keys up to its own position; the last query has the position of the last key."""


@cache
def window(size: int) -> Mask:
    """Causal, `size` tokens including the query's own. Beltagy et al. 2020, arXiv:2004.05150."""
    return Mask(_band, (_positive("window", size) - 1, 0))


@cache
def band(before: int, after: int) -> Mask:
    """A two-sided window: the query's own position, `before` keys before it and `after` keys after it."""
    _not_negative("band", before, after)
    return Mask(_band, (before, after))


@cache
def window_with_sinks(size: int, num_sinks: int) -> Mask:
    """Causal, `size` tokens including its own and the first `num_sinks` of all. Xiao et al. 2023, arXiv:2309.17453."""
    _not_negative("number of sinks", num_sinks)
    return Mask(_window_with_sinks, (_positive("window", size), num_sinks))


def prefix(lengths: Tensor) -> Mask:
    """Causal, but all queries attend to the first lengths[b] keys of sequence b (prefix-LM). Integer [B]. arXiv:1910.10683."""
    return Mask(_prefix, q_data=lengths[:, None, None].int())


def documents(ids: Tensor, size: int | None = None, *, causal: bool = True) -> Mask:
    """Tokens attend within their document, causally, with a window of `size` tokens if given. arXiv:2107.02027.

    ids: integer [B, S]; a document is a run of equal ids. (Not causal: all equal ids; fastest where they rise along a sequence.)
    """
    if ids.dim() != 2:
        said = f"documents' ids are of shape {list(ids.shape)}"
        raise SpecError(said, fix="give ids [B, S]: ids[None] for one sequence")
    if not causal:
        data = ids[:, None, :].int()
        return Mask(_same_document, (), data, data)
    # A query needs only the start of its document: one number per row of scores, none per column.
    places = torch.arange(ids.shape[1], device=ids.device)
    changed = torch.ones_like(ids, dtype=torch.bool)
    changed[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = torch.where(changed, places, 0).cummax(-1).values
    first = first if size is None else torch.maximum(first, places - (_positive("window", size) - 1))
    return Mask(_since, q_data=first[:, None, :].int())


def since(first: Tensor, *, causal: bool = True) -> Mask:
    """Query i of sequence b attends to the keys from first[b, i] on: up to its own position, or (not causal) to the last one.

    first: integer [B or 1, Sq], counted from the first key; any numbers of queries and keys, as for CAUSAL. For queries and
    keys that are parts of longer sequences; `documents` makes it for whole ones.
    """
    return Mask(_causal_from if causal else _from, q_data=first[:, None, :].int())


def documents_at(cu_seqlens: Tensor, seq_len: int, size: int | None = None, *, causal: bool = True) -> Mask:
    """`documents` of one sequence of seq_len tokens by their starts: cu_seqlens int [num_documents + 1], rising from 0."""
    places = torch.arange(seq_len, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return documents(torch.searchsorted(cu_seqlens, places, right=True)[None], size, causal=causal)


def longformer(is_global: Tensor, before: int, after: int = 0, *, causal: bool = False) -> Mask:
    """A band and global tokens (every pair with one is kept): is_global bool [B or 1, S]. Beltagy et al. 2020, arXiv:2004.05150."""
    _not_negative("band", before, after)
    data = is_global[:, None, :].int()
    return Mask(_longformer_causal if causal else _longformer, (before, after), data, data)


def block_sparse(table: Tensor, block: int, *, causal: bool = False) -> Mask:
    """The pairs of blocks that a table allows: bool [nq, nk], [H, nq, nk] or [B, H, nq, nk]; block a power of two from 16.

    Kernels are fastest with blocks of 128 or more: a tile never crosses a block.
    """
    if not 2 <= table.dim() <= 4:
        said = f"a mask's table is of shape {list(table.shape)}"
        raise SpecError(said, fix="give [nq, nk], [H, nq, nk] or [B, H, nq, nk]")
    table = table.reshape((1,) * (4 - table.dim()) + tuple(table.shape))
    return Mask(_causal if causal else _all, (), None, None, table, block)


def bigbird(
    seq_len: int,
    *,
    block: int = 64,
    num_window: int = 3,
    num_global: int = 2,
    num_random: int = 3,
    seed: int = 0,
    num_heads: int = 1,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Mask:
    """Window, global and random blocks. Zaheer et al. 2020, arXiv:2007.14062 (give each layer its own `seed`).

    A block of queries attends to the `num_window` blocks around its own, the first ceil(num_global / 2) and last
    num_global // 2 blocks (which attend to all), and `num_random` more, drawn for each of `num_heads` without repetition.
    With `causal` it attends to no later block: the window reaches back only, the global blocks are the first num_global.
    """
    count = -(-seq_len // block)
    row, column = torch.arange(count)[:, None], torch.arange(count)[None, :]
    if causal:
        kept = (row - column < num_window) | (column < num_global)
        allowed = column <= row
    else:
        half = num_window // 2
        ends = torch.zeros(count, dtype=torch.bool)
        ends[: -(-num_global // 2)] = True
        ends[count - num_global // 2 :] = True
        kept = ((row - column).abs() <= half) | ends[:, None] | ends[None, :]
        allowed = torch.ones_like(kept)
    kept = (kept & allowed).expand(num_heads, count, count)
    draws = torch.rand(kept.shape, generator=torch.Generator().manual_seed(seed))
    draws = draws.masked_fill(kept | ~allowed, -1.0)
    best, chosen = draws.topk(min(num_random, count), dim=-1)
    table = kept.clone().scatter_(-1, chosen, kept.gather(-1, chosen) | (best >= 0))
    return block_sparse(table.to(device), block, causal=causal)


def _not_negative(what: str, *values: int) -> None:
    if min(values) < 0:
        raise SpecError(f"a {what} of {min(values)} tokens", fix="count tokens from 0")


def _positive(what: str, value: int) -> int:
    if value < 1:
        raise SpecError(f"a {what} of {value} tokens keeps no key", fix=f"give a {what} of at least 1 token, its own")
    return value
