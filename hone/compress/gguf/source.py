"""The tensors of a checkpoint as GGUF stores them: read, reordered and packed a few rows at a time.

Shapes: N rows, K columns, G groups of columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.compress.gguf import blocks
from hone.compress.gguf.container import Entry
from hone.compress.gguf.formats import FORMATS, Format
from hone.compress.gguf.names import row_order
from hone.model.hf import Checkpoint
from hone.model.quantized.scheme import Scheme, dequantize
from hone.ops import formats

CHUNK = {"cpu": 1 << 17, "cuda": 1 << 25}
"""Weights that are packed at a time: what a CPU's cache holds with the temporaries of a search."""


@dataclass(frozen=True)
class Source:
    """One tensor of the file and where it comes from: `module`.`leaf` of the checkpoint, or `values`."""

    entry: Entry
    module: str
    leaf: str = "weight"
    scheme: Scheme | None = None
    """How the checkpoint stores it; None for a dense tensor."""
    asked: str = "f32"
    """The type that was asked for it: another than the entry's where its rows do not fit."""
    values: Tensor | None = None

    @property
    def repacked(self) -> bool:
        """Whether the file gets the checkpoint's codes."""
        return self.scheme is not None and holds(self.entry.form, self.scheme, self.entry.columns)


def holds(form: Format, scheme: Scheme, columns: int) -> bool:
    """Whether blocks of `form` can hold the codes of `scheme` as they are."""
    width = scheme.extent(1, columns)[1]
    plain = scheme.number == "int" and scheme.symmetric and form.block == form.group > 1 and not form.minimum
    return plain and scheme.bits <= form.bits and width % form.block == 0 and columns % width == 0


def holding(scheme: Scheme, columns: int) -> Format | None:
    """The smallest format that holds the codes of `scheme`; None when there is none."""
    able = [form for form in FORMATS.values() if holds(form, scheme, columns)]
    return min(able, key=lambda form: form.bits, default=None)


def scales_change(checkpoint: Checkpoint, source: Source) -> float:
    """The largest relative change of a scale when it is stored as float16; infinite where that overflows or gives 0."""
    stored = checkpoint.tensor(f"{source.module}.weight_scale").double()
    half = stored.to(torch.float16).double()
    change = ((half - stored) / stored).abs().amax()
    return float(change) if bool(torch.isfinite(half).all()) and bool(half.all()) else float("inf")


def pieces(checkpoint: Checkpoint, source: Source, device: str, importance: Mapping[str, Tensor]) -> Iterator[Any]:
    """The bytes of a tensor, in order."""
    entry = source.entry
    if source.values is not None:
        yield _bytes(source.values.float())
        return
    order = row_order(checkpoint.config, source.module)
    name = f"{source.module}.{source.leaf}"
    if not entry.columns:
        vector = checkpoint.converted(name, checkpoint.tensor(name), "cpu", torch.float32)
        yield _bytes(vector if order is None else vector[order])
        return
    weighted = importance.get(source.module)
    weighted = None if weighted is None else weighted.to(device, torch.float32)
    read = _dense(checkpoint, name) if source.scheme is None else _quantized(checkpoint, source, source.scheme)
    step = max(1, CHUNK.get(torch.device(device).type, CHUNK["cpu"]) // entry.columns)
    for begin in range(0, entry.rows, step):
        end = min(begin + step, entry.rows)
        rows = torch.arange(begin, end) if order is None else order[begin:end]
        if source.repacked:
            yield _bytes(blocks.repack(*read(rows)[:2], entry.form))
            continue
        holder = name if source.scheme is None else f"{source.module}.weight_scale"  # for the error it raises
        weights = checkpoint.converted(holder, _floats(read(rows), source.scheme), device, _dtype(entry.form)).float()
        yield _bytes(blocks.encode(weights, entry.form, weighted))
    checkpoint.close()


def _dtype(form: Format) -> torch.dtype:
    """The dtype in which a weight must be finite before it is stored."""
    return torch.float16 if form.name == "f16" else torch.float32


def _dense(checkpoint: Checkpoint, name: str) -> Any:
    tensor = checkpoint.tensor(name)
    return lambda rows: (tensor[rows],)


def _quantized(checkpoint: Checkpoint, source: Source, scheme: Scheme) -> Any:
    """A reader of rows: (codes [n, K], scales [n, G], zero points [n, G] or None)."""
    rows, columns = source.entry.rows, source.entry.columns
    part = {
        suffix: checkpoint.tensor(f"{source.module}.{suffix}")
        for suffix in scheme.shapes(rows, columns)
        if suffix != "weight_shape"
    }
    scales = scheme.by_row(part["weight_scale"], rows, columns)
    points = scheme.read_zero_points(part, rows)
    points = None if points is None else scheme.by_row(points, rows, columns)
    packed = part.get("weight_packed")

    def read(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if packed is None:
            codes = part["weight"].view(torch.int8)[chosen].view(scheme.code_dtype)
        else:
            codes = formats.unpack(packed[chosen], scheme.bits, columns)
        return codes, scales[chosen], None if points is None else points[chosen]

    return read


def _floats(read: tuple[Any, ...], scheme: Scheme | None) -> Tensor:
    """The weights [n, K] of what a reader returned."""
    if scheme is None:
        return read[0]
    codes, scales, points = read
    columns = codes.shape[1]
    return dequantize(codes, scales, points, scheme.extent(1, columns)[1], torch.float32)


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.cpu().contiguous().view(torch.uint8).numpy().reshape(-1))
