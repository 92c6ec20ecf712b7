"""Programs: tables of operations on few rows that compiled code runs in one call, all threads together.

A decode step of a whole model is one program, a single product is one too. The units of an operation (rows of a weight, heads of a
sequence) are taken by whichever thread is free; the next operation begins when all units are done, so a program ends with
any number of threads, however late they come.

Legend: S rows (sequences with one new token each), N and K output and input features of a product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.measure.compilers import sources_digest
from hone.ops.cpu.family import FIELDS, HEADER, KINDS, WEIGHTS, Family
from hone.ops.cpu.threads import run_on_threads
from hone.ops.linear.cpu_weights import CpuWeight, quantized_bytes

_CHUNK_BYTES = 1 << 16
_PRODUCT_BYTES = 64 * (128 + 4 * 8)
"""Bytes that a thread needs for a product: its unfinished sums."""
_SPARE = 64


def scratch_bytes(head_dim: int) -> int:
    """Bytes that a thread needs for attention: scores of 256 keys and sums of values of 8 heads, and vectors."""
    return 4 * (256 + 16) * 8 + 4 * 8 * head_dim + 512


class Program:
    """Operations for up to `most_rows` rows, added in order. It holds every tensor whose address it holds."""

    def __init__(self, dtype: torch.dtype, most_rows: int, scratch_bytes: int = 0) -> None:
        self.family = Family.of(dtype)
        self.most_rows = most_rows
        self._ops: list[list[int]] = []
        self._kept: list[Any] = []
        self._table: np.ndarray | None = None
        self._header = np.zeros(HEADER, dtype=np.int64)
        self._scratch_bytes = -(-max(scratch_bytes, _PRODUCT_BYTES) // 64) * 64
        self._codes: dict[tuple[int, bool], Tensor] = {}
        self._scratch: Tensor | None = None
        self._code = 0

    def floats(self, columns: int) -> Tensor:
        """A buffer f32 [most_rows, columns] for values between operations."""
        return self._keep(torch.zeros(self.most_rows, columns))

    def operand(self, columns: int) -> Tensor:
        """A buffer for inputs of products, [most_rows, columns]; what is never written stays 0."""
        # Rows a multiple of 4096 bytes apart would compete for the same places of the first cache.
        size = torch.empty(0, dtype=self.family.operand).element_size()
        width = columns + (2048 // size if columns * size % 4096 == 0 else 0)
        return self._keep(torch.zeros(self.most_rows, width, dtype=self.family.operand)[:, :columns])

    def kept(self, values: Tensor) -> int:
        """The address of a tensor, which lives as long as the program."""
        return int(self._keep(values).data_ptr())

    def widen(self, source: Tensor, out: Tensor) -> int:
        """out f32 [S, D] = source [S, D] of the program's dtype. Returns the operation's index."""
        return self._add(
            "widen", 1, True, self.kept(source), source.stride(0), self.kept(out), out.stride(0), source.shape[1]
        )

    def narrow(self, source: Tensor, out: Tensor) -> int:
        """out [S, D] of the program's dtype = source f32 [S, D]."""
        return self._add(
            "narrow", 1, True, self.kept(source), source.stride(0), self.kept(out), out.stride(0), out.shape[1]
        )

    def load_operand(self, source: Tensor, out: Tensor) -> int:
        """out, an operand, = source [S, D] of the program's dtype."""
        return self._add(
            "operand", 1, True, self.kept(source), source.stride(0), self.kept(out), out.stride(0), source.shape[1]
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, offset: float = 0.0) -> None:
        """out, an operand, = x / rms(x) * (weight + offset) of x f32 [S, D]."""
        wide = (weight.detach().float() + offset).contiguous()
        self._add(
            "norm", 1, True, self.kept(x), x.stride(0), self.kept(wide), self._numbers(eps), self.kept(out), out.stride(0),
            x.shape[1],
        )  # fmt: skip

    def product(self, x: Tensor, weight: CpuWeight, out: Tensor, *, onto: bool = False, hold: bool = True) -> int:
        """out f32 [S, N] = x W^T + b of an operand x; with `onto` added to what out holds. Without `hold` see `point_weight`."""
        if hold:
            self._kept.append(weight)
        if weight.stored in WEIGHTS[1:]:
            x = self._quantized(x, weight.columns, split=weight.stored in ("i4", "i4s"))
        stride = weight.row_bytes
        chunk = max(4, min(256, _CHUNK_BYTES // stride) // 4 * 4)
        stored = WEIGHTS.index(weight.stored) if weight.stored in WEIGHTS else 0
        return self._add(
            "product", -(-weight.out_features // chunk), False, stored, weight.data.data_ptr(), stride, weight.out_features, chunk,
            self.kept(x), x.stride(0) * x.element_size(), weight.columns, *_addresses(weight), self.kept(out), out.stride(0),
            int(onto),
        )  # fmt: skip

    def rope(
        self, qkv: Tensor, q: Tensor, heads: tuple[int, int, int], angles: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor],
        norms: tuple[Tensor | None, Tensor | None] = (None, None), eps: float = 0.0,
    ) -> None:  # fmt: skip
        """Rotates q and k of qkv f32 [S, (H + 2 KV) Dh], normed before where `norms` has weights, writes q and the pages.

        `heads` is (H, KV, Dh); angles cos and sin f32 [positions, Dh / 2]; pages [P, KV, page_size, Dh]. One a program's
        step: positions, pages and offsets are those of `run`.
        """
        k_pages, v_pages = pages
        wide = [None if one is None else one.detach().float().contiguous() for one in norms]
        self._add(
            "rope", 1, True, self.kept(qkv), qkv.stride(0), self.kept(q), q.stride(0), *heads, self.kept(angles[0]),
            self.kept(angles[1]), self.kept(k_pages), self.kept(v_pages), k_pages.stride(0), k_pages.shape[2],
            self._or_none(wide[0]), self._or_none(wide[1]), self._numbers(eps),
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        heads: tuple[int, int, int],
        pages: tuple[Tensor, Tensor],
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        """out, an operand [S, H Dh], = attention of the queries to the pages of their sequences."""
        k_pages, v_pages = pages
        self._add(
            "attend", heads[1], True, self.kept(q), q.stride(0), *heads, self.kept(k_pages), self.kept(v_pages),
            k_pages.stride(0), k_pages.shape[2], self._numbers(scale), window or 0, self.kept(out), out.stride(0),
        )  # fmt: skip

    def gate(self, gate_up: Tensor, out: Tensor, width: int) -> None:
        """out, an operand [S, F], = silu(gate) up of gate_up f32 [S, 2 F]."""
        chunk = 512
        self._add(
            "gate",
            -(-width // chunk),
            True,
            self.kept(gate_up),
            gate_up.stride(0),
            self.kept(out),
            out.stride(0),
            width,
            chunk,
        )

    def unpack(self, weight: CpuWeight, out: Tensor, columns: int) -> int:
        """out [N, K] of the program's dtype = the weight of `weight`, 4-bit blocks, times its scales. Not of `row_scales`."""
        return self._add(
            "unpack", -(-weight.out_features // 16), False, self.kept(weight.data), weight.row_bytes, self.kept(out),
            out.stride(0), weight.out_features, columns, *_addresses(weight)[:3],
        )  # fmt: skip

    def point_weight(self, index: int, weight: CpuWeight) -> None:
        """Lets product `index` read another weight of the same format and shape, which lives until `run` has returned."""
        table = self._packed()
        table[index, 5], table[index, 6] = weight.data.data_ptr(), weight.row_bytes
        table[index, 12:17] = _addresses(weight)

    def point(self, index: int, source: Tensor) -> None:
        """Lets operation `index` (`widen`, `narrow`, `load_operand`) read `source` instead, of the same width."""
        table = self._packed()
        table[index, 4], table[index, 5] = source.data_ptr(), source.stride(0)

    def point_out(self, index: int, out: Tensor) -> None:
        """Lets operation `index` (`widen`, `narrow`, `load_operand`) write `out` instead."""
        table = self._packed()
        table[index, 6], table[index, 7] = out.data_ptr(), out.stride(0)

    def run(self, rows: int, sequences: tuple[Tensor, ...] = ()) -> None:
        """Runs all operations on `rows` rows. `sequences`: positions, pages, offsets int64 [S], ends int32 [S], table int32 [S, P]."""
        assert 0 < rows <= self.most_rows, f"{rows} rows in a program for {self.most_rows}"
        table, header = self._packed(), self._header
        threads = torch.get_num_threads()
        if self._scratch is None or len(self._scratch) < threads:
            self._scratch = torch.zeros(threads, self._scratch_bytes + _SPARE, dtype=torch.uint8)
        table[:, 1:3] = 0
        header[:6] = 0, len(table), table.ctypes.data, self._scratch.data_ptr(), self._scratch.stride(0), rows
        if sequences:
            header[6:11] = [one.data_ptr() for one in sequences]
            header[11] = sequences[4].stride(0)
        run_on_threads(self.compile(), header.ctypes.data, threads)

    def compile(self) -> int:
        """The address of the code that runs this program. The first call on a machine takes seconds."""
        if self._code == 0:
            kinds = tuple(kind for index, kind in enumerate(KINDS) if any(op[0] == index for op in self._ops))
            products = {WEIGHTS[op[4]] for op in self._ops if op[0] == KINDS.index("product")}
            groups = {op[6] // op[7] for op in self._ops if op[0] == KINDS.index("attend")}
            self._code = compiled(self.family, kinds, tuple(sorted(products)), tuple(sorted(groups)))
        return self._code

    def _quantized(self, x: Tensor, columns: int, *, split: bool) -> Tensor:
        """Adds the operation that makes codes of an operand, for products of codes. Its buffer serves one product after another.

        `split`: for codes of 4 bits (`cpu_codes`).
        """
        key = (columns, split)
        if key not in self._codes:
            self._codes[key] = torch.zeros(self.most_rows, quantized_bytes(columns), dtype=torch.uint8)
        out = self._codes[key]
        self._add("quantize", 1, True, self.kept(x), x.stride(0), self.kept(out), out.stride(0), columns, int(split))
        return out

    def _packed(self) -> np.ndarray:
        if self._table is None or len(self._table) != len(self._ops):
            self._table = np.array(self._ops, dtype=np.int64)
        return self._table

    def _add(self, kind: str, units: int, each_row: bool, *args: int) -> int:
        """An operation of `units` units, for `each_row` as many for every row."""
        row = [KINDS.index(kind), 0, 0, units if not each_row else -units, *args]
        self._ops.append(row + [0] * (FIELDS - len(row)))
        return len(self._ops) - 1

    def _keep(self, values: Tensor) -> Tensor:
        self._kept.append(values)
        return values

    def _numbers(self, *values: float) -> int:
        return self.kept(torch.tensor(values, dtype=torch.float32))

    def _or_none(self, values: Tensor | None) -> int:
        return 0 if values is None else self.kept(values)


_ONE = torch.ones(1)


def _addresses(weight: CpuWeight) -> tuple[int, int, int, int, int]:
    """Of a weight's scales the address, stride in bytes and log2 of the group size; addresses of row scales and bias, or 0."""
    row_scales, bias = (0 if one is None else one.data_ptr() for one in (weight.row_scales, weight.bias))
    if weight.scales is None:
        return _ONE.data_ptr(), 0, 62, row_scales, bias
    shift = weight.group_size.bit_length() - 1
    return weight.scales.data_ptr(), 4 * weight.scales.stride(0), shift, row_scales, bias


@cache
def compiled(family: Family, kinds: tuple[str, ...], weights: tuple[str, ...], groups: tuple[int, ...]) -> int:
    """The address of an interpreter of programs, as `interpreter` makes it: compiled once a machine, then read from disk."""
    from hone.ops.cpu.interpreter import interpreter

    function = interpreter(family, kinds, weights, groups, sources_digest(interpreter.__module__))
    _COMPILED.append(function)  # it would free its code
    return int(function.address)


_COMPILED: list[Any] = []
