"""MXFP4, 4-bit floats with a power of two for every 32 columns: compressed-tensors' mxfp4-pack-quantized, and gpt-oss's experts."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.model.quantized.layouts.base import Entry, Layout, typed
from hone.model.quantized.layouts.nvfp4 import pack_nibbles, unpack_nibbles
from hone.model.quantized.scheme import Scheme, Stored

GROUP_SIZE = 32


class MXFP4(Layout):
    """`weight_packed` uint8 [N, K / 2] (even columns in low nibbles), `weight_scale` uint8 [N, K / 32]: exponents + 127."""

    method = "compressed-tensors"
    integers = frozenset({"weight_packed", "weight_scale"})

    def problem(self, scheme: Scheme) -> str | None:
        found = (scheme.number, scheme.bits, scheme.group_size, scheme.symmetric, scheme.scales)
        return None if found == ("e2m1", 4, GROUP_SIZE, True, "e8m0") else scheme.described

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        scales: Entry = (torch.uint8, scheme.grid(rows, columns))
        return {"weight_packed": (torch.uint8, (rows, -(-columns // 2))), "weight_scale": scales}

    def write(self, stored: Stored) -> dict[str, Tensor]:
        return {"weight_packed": pack_nibbles(stored.codes), "weight_scale": stored.scales.view(torch.uint8)}

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        codes = unpack_nibbles(typed(part, "weight_packed", torch.uint8), columns)
        return Stored(scheme, codes, typed(part, "weight_scale", torch.uint8).view(torch.float8_e8m0fnu))


class ExpertsMXFP4(MXFP4):
    """The same tensors of one expert, whose checkpoints have all experts of a layer in one tensor (hone.model.weights.stacked)."""

    method = "mxfp4"
