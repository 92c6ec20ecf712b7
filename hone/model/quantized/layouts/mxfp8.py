"""compressed-tensors' mxfp8-quantized: 8-bit floats, a power of two for every 32 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.model.quantized.layouts.base import Entry, Layout, typed
from hone.model.quantized.layouts.mxfp4 import GROUP_SIZE
from hone.model.quantized.scheme import Scheme, Stored


class MXFP8(Layout):
    """`weight` e4m3 [N, K], `weight_scale` uint8 [N, K / 32]: exponents + 127."""

    method = "compressed-tensors"
    integers = frozenset({"weight", "weight_scale"})

    def problem(self, scheme: Scheme) -> str | None:
        found = (scheme.number, scheme.bits, scheme.group_size, scheme.symmetric, scheme.scales)
        return None if found == ("e4m3", 8, GROUP_SIZE, True, "e8m0") else scheme.described

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        scales: Entry = (torch.uint8, scheme.grid(rows, columns))
        return {"weight": (torch.float8_e4m3fn, (rows, columns)), "weight_scale": scales}

    def write(self, stored: Stored) -> dict[str, Tensor]:
        return {"weight": stored.codes, "weight_scale": stored.scales.view(torch.uint8)}

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        codes = typed(part, "weight", torch.float8_e4m3fn)
        return Stored(scheme, codes, typed(part, "weight_scale", torch.uint8).view(torch.float8_e8m0fnu))
