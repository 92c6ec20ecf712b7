"""Storage layouts: the tensors of a checkpoint that hold a quantized weight. One file a layout, found by name in `layout_of`."""

from __future__ import annotations

import torch

from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.layouts.one_byte import OneByte
from hone.model.quantized.layouts.pack_quantized import PackQuantized
from hone.model.quantized.scheme import Scheme

LAYOUTS: dict[str, Layout] = {
    "pack-quantized": PackQuantized(),
    "int-quantized": OneByte(("int",)),
    "float-quantized": OneByte(("e4m3", "e5m2")),
}


def layout_of(scheme: Scheme) -> Layout:
    """The layout that `scheme` names."""
    return LAYOUTS[scheme.layout]


def shapes_of(scheme: Scheme, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint module [rows, columns] by suffix, without a bias."""
    tensors = layout_of(scheme).tensors(scheme, rows, columns, torch.float32)
    return {suffix: shape for suffix, (_, shape) in tensors.items()}


def problem(scheme: Scheme) -> str | None:
    """Why no checkpoint can store this combination, or hone cannot compute with it yet; None when both can."""
    if scheme.activations is not None:
        return "quantized activations: hone computes with quantized weights alone"
    if scheme.layout not in LAYOUTS:
        return f"the layout {scheme.layout}, which hone does not run yet"
    return layout_of(scheme).problem(scheme)


__all__ = ["LAYOUTS", "Entry", "Layout", "layout_of", "problem", "shapes_of"]
