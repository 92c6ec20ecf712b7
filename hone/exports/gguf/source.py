"""The tensors of a checkpoint as GGUF stores them: read, reordered and packed a few rows at a time.

Shapes: N rows, K columns, G groups of columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.exports.gguf import blocks
from hone.exports.gguf.container import Entry
from hone.exports.gguf.formats import FORMATS, Format
from hone.exports.gguf.names import row_order
from hone.model.hf import Checkpoint
from hone.model.quantized.layouts import layout_of, shapes_of
from hone.model.quantized.scheme import Scheme, Stored, dequantize
from hone.ops.rounding.numbers import scale_values

CHUNK = {"cpu": 1 << 17, "cuda": 1 << 25}
"""Weights that are packed at a time: what a CPU's cache holds with the temporaries of a search."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the file and where it comes from: `module`.`leaf` of the checkpoint, or `values`."""

    entry: Entry
    module: str
    leaf: str = "weight"
    scheme: Scheme | None = None
    """How the checkpoint stores it; None for a dense tensor."""
    change: float = 0.0
    """The largest relative change of the scales of repacked codes."""
    asked: str = "f32"
    """The type that was asked for it: another than the entry's where its rows do not fit."""
    values: Tensor | None = None
    offset: float = 0.0
    """Added to a norm's weights: checkpoints of some families store them less 1."""

    @property
    def repacked(self) -> bool:
        """Whether the file gets the checkpoint's codes."""
        return self.scheme is not None and holds(self.entry.form, self.scheme, self.entry.columns)


def holds(form: Format, scheme: Scheme, columns: int) -> bool:
    """Whether blocks of `form` can hold the codes of `scheme` as they are."""
    width = scheme.extent(1, columns)[1]
    plain = scheme.number == "int" and scheme.symmetric and not scheme.permuted
    plain = plain and form.block == form.group > 1 and not form.minimum
    return plain and scheme.bits <= form.bits and width % form.block == 0 and columns % width == 0


def holding(scheme: Scheme, columns: int) -> Format | None:
    """The smallest format that holds the codes of `scheme`; None when there is none."""
    able = [form for form in FORMATS.values() if holds(form, scheme, columns)]
    return min(able, key=lambda form: form.bits, default=None)


def stored_of(checkpoint: Checkpoint, module: str, scheme: Scheme, rows: int, columns: int) -> Stored:
    """Codes and scales of a checkpoint module [rows, columns], whole."""
    part = {suffix: checkpoint.tensor(f"{module}.{suffix}") for suffix in shapes_of(scheme, rows, columns)}
    return layout_of(scheme).read(scheme, part, columns)


def scales_change(stored: Stored) -> float:
    """The largest relative change of a scale when it is stored as float16: 1 where that gives 0, infinite or NaN where it
    is not finite."""
    exact = stored.scales.double()
    change = (exact.to(torch.float16).double() - exact).abs() / exact.abs()
    return float(torch.where(exact == 0, 0.0, change).amax())


def pieces(checkpoint: Checkpoint, source: FileTensor, device: str, importance: Mapping[str, Tensor]) -> Iterator[Any]:
    """The bytes of a tensor, in order."""
    entry = source.entry
    if source.values is not None:
        yield _bytes(source.values.float())
        return
    order = row_order(checkpoint.config, source.module)
    name = f"{source.module}.{source.leaf}"
    if not entry.columns:
        vector = checkpoint.converted(name, checkpoint.tensor(name), "cpu", torch.float32)
        yield _bytes((vector if order is None else vector[order]) + source.offset)
        return
    weighted = importance.get(source.module)
    weighted = None if weighted is None else weighted.to(device, torch.float32)
    stored = None
    if source.scheme is not None:
        stored = stored_of(checkpoint, source.module, source.scheme, entry.rows, entry.columns)
        name = f"{source.module}.{next(iter(shapes_of(source.scheme, entry.rows, entry.columns)))}"
    step = max(1, CHUNK.get(torch.device(device).type, CHUNK["cpu"]) // entry.columns)
    for begin in range(0, entry.rows, step):
        rows = torch.arange(begin, min(begin + step, entry.rows))
        rows = rows if order is None else order[rows]
        if stored is not None and source.repacked:
            yield _bytes(blocks.repack(stored.codes[rows], _by_row(stored, stored.scales)[rows], entry.form))
            continue
        weights = checkpoint.tensor(name)[rows] if stored is None else _dequantized(stored, rows)
        finite = torch.float16 if entry.form.name == "f16" else torch.float32  # the dtype that must hold the weights
        weights = checkpoint.converted(name, weights, device, finite).float()
        yield _bytes(blocks.encode(weights, entry.form, weighted))
    checkpoint.close()


def _dequantized(stored: Stored, rows: Tensor) -> Tensor:
    """The weights float32 [n, K] of some rows."""
    columns, scheme = stored.codes.shape[1], stored.scheme
    points = None if stored.zero_points is None else _by_row(stored, stored.zero_points)[rows]
    width = scheme.extent(len(stored.codes), columns)[1]
    scales = _by_row(stored, scale_values(stored.scales, stored.global_scale))[rows]
    return dequantize(stored.codes[rows], scales, points, width, torch.float32, scheme.number, stored.index)


def _by_row(stored: Stored, values: Tensor) -> Tensor:
    """Scales or zero points, one set per row: [N, G]."""
    return stored.scheme.by_row(values, *stored.codes.shape)


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.cpu().contiguous().view(torch.uint8).numpy().reshape(-1))
