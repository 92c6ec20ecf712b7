"""The layout of transformers' fine-grained fp8 (DeepSeek-V3's): e4m3 codes, one float32 scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.scheme import Scheme, Stored


class FP8Block(Layout):
    """`weight` float8_e4m3fn [N, K], `weight_scale_inv` float32 [R, G]; weight = code x scale, despite the name.

    Source: transformers 5.23, `integrations/finegrained_fp8.py`; DeepSeek-AI 2024, arXiv:2412.19437.
    """

    method = "fp8"
    integers = frozenset({"weight"})

    def problem(self, scheme: Scheme) -> str | None:
        return None if scheme.number == "e4m3" and scheme.strategy == "block" else scheme.described

    def shape_problem(self, scheme: Scheme, rows: int, columns: int) -> str | None:
        # transformers' dequantization infers the block from the number of scales.
        high, wide = scheme.extent(rows, columns)
        fits = (rows < high or rows % high == 0) and (columns < wide or columns % wide == 0)
        return None if fits else f"blocks of {high} x {wide} must divide it"

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        grid = scheme.grid(rows, columns)
        return {"weight": (torch.float8_e4m3fn, (rows, columns)), "weight_scale_inv": (torch.float32, grid)}

    def write(self, stored: Stored) -> dict[str, Tensor]:
        return {"weight": stored.codes, "weight_scale_inv": stored.scales}

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        if part["weight"].dtype != torch.float8_e4m3fn:
            raise ArtifactError(
                f"codes of a quantized weight are {part['weight'].dtype}, config.json's fp8 needs torch.float8_e4m3fn",
                fix="pair the weights with the config.json they were saved with",
            )
        return Stored(scheme, part["weight"], part["weight_scale_inv"])
