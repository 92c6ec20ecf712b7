"""compressed-tensors' nvfp4-pack-quantized: 4-bit floats, an 8-bit float scale for 16 columns, and one for the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.model.quantized.layouts.base import Entry, Layout, typed
from hone.model.quantized.scheme import Scheme, Stored
from hone.ops import formats

GROUP_SIZE = 16


class NVFP4(Layout):
    """`weight_packed` uint8 [N, K / 2] (even columns in low nibbles), `weight_scale` e4m3 [N, K / 16], `weight_global_scale`
    float32 [1]: a weight is code * scale / global scale."""

    method = "compressed-tensors"
    integers = frozenset({"weight_packed", "weight_scale"})

    def problem(self, scheme: Scheme) -> str | None:
        found = (scheme.number, scheme.bits, scheme.group_size, scheme.symmetric, scheme.scales)
        return None if found == ("e2m1", 4, GROUP_SIZE, True, "e4m3") else scheme.described

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        return {
            "weight_packed": (torch.uint8, (rows, -(-columns // 2))),
            "weight_scale": (torch.float8_e4m3fn, scheme.grid(rows, columns)),
            "weight_global_scale": (torch.float32, (1,)),
        }

    def write(self, stored: Stored) -> dict[str, Tensor]:
        assert stored.global_scale is not None, "NVFP4 needs a global scale"
        return {
            "weight_packed": pack_nibbles(stored.codes),
            "weight_scale": stored.scales,
            "weight_global_scale": stored.global_scale.clone(),  # modules of one matrix share it, files share no memory
        }

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        codes = unpack_nibbles(typed(part, "weight_packed", torch.uint8), columns)
        scales = typed(part, "weight_scale", torch.float8_e4m3fn)
        return Stored(scheme, codes, scales, global_scale=part["weight_global_scale"])


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes int8 [N, K] of 4 bits as bytes uint8 [N, ceil(K / 2)], the even column in the low nibble."""
    return formats.pack(codes, 4).view(torch.uint8)[:, : -(-codes.shape[1] // 2)].contiguous()


def unpack_nibbles(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return formats.unpack(torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4)).view(torch.int32), 4, columns)
