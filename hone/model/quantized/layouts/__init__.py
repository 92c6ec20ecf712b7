"""Storage layouts: the tensors of a checkpoint that hold a quantized weight. One file a layout, found by name in `layout_of`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hone.model.quantized.layouts.awq import AWQ
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.layouts.bitsandbytes_4bit import Bitsandbytes4
from hone.model.quantized.layouts.fp8_block import FP8Block
from hone.model.quantized.layouts.gptq import GPTQ
from hone.model.quantized.layouts.llm_int8 import LLMInt8
from hone.model.quantized.layouts.mxfp4 import MXFP4, ExpertsMXFP4
from hone.model.quantized.layouts.mxfp8 import MXFP8
from hone.model.quantized.layouts.nvfp4 import NVFP4
from hone.model.quantized.layouts.one_byte import OneByte
from hone.model.quantized.layouts.pack_quantized import PackQuantized
from hone.model.quantized.scheme import Scheme, Stored
from hone.ops.rounding import inputs as rounded_inputs

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
    "nvfp4-pack-quantized": NVFP4(),
    "mxfp4-pack-quantized": MXFP4(),
    "mxfp4": ExpertsMXFP4(),
    "mxfp8-quantized": MXFP8(),
}


def layout_of(scheme: Scheme) -> Layout:
    """The layout that `scheme` names."""
    return LAYOUTS[scheme.layout]


def tensors_of(scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
    """Dtype and shape of every tensor of a checkpoint module [rows, columns] by suffix, without a bias."""
    inputs = rounded_inputs.tensors_of(scheme.activations)
    found = layout_of(scheme).tensors(scheme, rows, columns, scale_dtype)
    return found | {suffix: (dtype, (1,)) for suffix, dtype in inputs.items()}


def shapes_of(scheme: Scheme, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint module [rows, columns] by suffix, without a bias; (-1,) for any length."""
    tensors, any_length = tensors_of(scheme, rows, columns, torch.float32), layout_of(scheme).any_length
    return {suffix: (-1,) if suffix in any_length else shape for suffix, (_, shape) in tensors.items()}


def write(stored: Stored) -> dict[str, Tensor]:
    """The tensors of one whole checkpoint module by suffix, with those of its inputs' rounding."""
    inputs = {suffix: tensor.clone() for suffix, tensor in stored.inputs.items()}  # a file's tensors share no memory
    return layout_of(stored.scheme).write(stored) | inputs


def read(scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
    """The inverse of `write`."""
    inputs = {suffix: part[suffix] for suffix in rounded_inputs.tensors_of(scheme.activations)}
    return replace(layout_of(scheme).read(scheme, part, columns), inputs=inputs)


_PRODUCTS = {("int", "int"), ("int", "e4m3"), ("e4m3", "e4m3"), ("e2m1", "e2m1"), ("e2m1", "e4m3")}
"""Numbers of weights and of inputs whose products engines have kernels for."""


def problem(scheme: Scheme) -> str | None:
    """Why no checkpoint can store this combination, or hone cannot compute with it yet; None when both can."""
    if scheme.layout not in LAYOUTS:
        return f"the layout {scheme.layout}, which hone does not run yet"
    if scheme.activations is not None:
        if layout_of(scheme).method != "compressed-tensors":
            return f"quantized activations in the layout {scheme.layout}"
        if (scheme.number, scheme.activations.number) not in _PRODUCTS:
            return f"{scheme.number} weights with {scheme.activations.number} inputs"
    return layout_of(scheme).problem(scheme)


__all__ = ["LAYOUTS", "Entry", "Layout", "layout_of", "problem", "read", "shapes_of", "tensors_of", "write"]
