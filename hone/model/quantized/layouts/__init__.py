"""Storage layouts: the tensors of a checkpoint that hold a quantized weight. One file a layout, found by name in `layout_of`."""

from __future__ import annotations

import torch

from hone.model.quantized.layouts.awq import AWQ
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.layouts.bitsandbytes_4bit import Bitsandbytes4
from hone.model.quantized.layouts.fp8_block import FP8Block
from hone.model.quantized.layouts.gptq import GPTQ
from hone.model.quantized.layouts.llm_int8 import LLMInt8
from hone.model.quantized.layouts.one_byte import OneByte
from hone.model.quantized.layouts.pack_quantized import PackQuantized
from hone.model.quantized.scheme import Scheme

LAYOUTS: dict[str, Layout] = {
    "pack-quantized": PackQuantized(),
    "int-quantized": OneByte(("int",)),
    "float-quantized": OneByte(("e4m3", "e5m2")),
    "gptq": GPTQ(subtracted=1),
    "gptq_v2": GPTQ(subtracted=0),
    "awq": AWQ(),
    "fp8": FP8Block(),
    "nf4": Bitsandbytes4("nf4", nested=False),
    "nf4-nested": Bitsandbytes4("nf4", nested=True),
    "fp4": Bitsandbytes4("fp4", nested=False),
    "fp4-nested": Bitsandbytes4("fp4", nested=True),
    "llm-int8": LLMInt8(),
}


def layout_of(scheme: Scheme) -> Layout:
    """The layout that `scheme` names."""
    return LAYOUTS[scheme.layout]


def shapes_of(scheme: Scheme, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint module [rows, columns] by suffix, without a bias; (-1,) for any length."""
    layout = layout_of(scheme)
    tensors = layout.tensors(scheme, rows, columns, torch.float32)
    return {suffix: (-1,) if suffix in layout.any_length else shape for suffix, (_, shape) in tensors.items()}


def problem(scheme: Scheme) -> str | None:
    """Why no checkpoint can store this combination, or hone cannot compute with it yet; None when both can."""
    if scheme.activations is not None:
        return "quantized activations: hone computes with quantized weights alone"
    if scheme.layout not in LAYOUTS:
        return f"the layout {scheme.layout}, which hone does not run yet"
    return layout_of(scheme).problem(scheme)


__all__ = ["LAYOUTS", "Entry", "Layout", "layout_of", "problem", "shapes_of"]
