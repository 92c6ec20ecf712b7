"""compressed-tensors' pack-quantized: integer codes of 2 to 8 bits as a dense stream of bits in words."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.scheme import Scheme, Stored
from hone.ops import formats


class PackQuantized(Layout):
    """`weight_packed` int32 [N, words of K codes], `weight_scale` [N, G], `weight_shape` int64 [2]; where asymmetric
    `weight_zero_point` int32 [words of N codes, G]."""

    method = "compressed-tensors"
    integers = frozenset({"weight_packed", "weight_shape", "weight_zero_point"})

    def problem(self, scheme: Scheme) -> str | None:
        if scheme.strategy not in ("group", "channel"):
            return f"strategy {scheme.strategy} in {scheme.layout}"
        return None if scheme.number == "int" and 2 <= scheme.bits <= 8 else scheme.described

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        grid = scheme.grid(rows, columns)
        found: dict[str, Entry] = {
            "weight_packed": (torch.int32, (rows, formats.num_words(columns, scheme.bits))),
            "weight_scale": (scale_dtype, grid),
            "weight_shape": (torch.int64, (2,)),
        }
        if not scheme.symmetric:
            found["weight_zero_point"] = (torch.int32, (formats.num_words(rows, scheme.bits), grid[1]))
        return found

    def write(self, stored: Stored) -> dict[str, Tensor]:
        bits = stored.scheme.bits
        part = {
            "weight_packed": formats.pack(stored.codes, bits),
            "weight_scale": stored.scales,
            "weight_shape": torch.tensor(stored.codes.shape, dtype=torch.int64),
        }
        if stored.zero_points is not None:  # packed along the rows: one word for the codes of 32 / bits rows
            part["weight_zero_point"] = formats.pack(stored.zero_points.T.contiguous(), bits).T.contiguous()
        return part

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        packed, points = part["weight_packed"], None
        if packed.dtype != torch.int32:
            raise ArtifactError(
                f"codes of a quantized weight are {packed.dtype}, config.json's {scheme.number} needs torch.int32",
                fix="pair the weights with the config.json they were saved with",
            )
        if not scheme.symmetric:
            stored = part["weight_zero_point"].T.contiguous()
            points = formats.unpack(stored, scheme.bits, len(packed)).T.contiguous()
        codes = formats.unpack(packed, scheme.bits, columns)
        return Stored(scheme, codes, part["weight_scale"].reshape(scheme.grid(*codes.shape)), points)
