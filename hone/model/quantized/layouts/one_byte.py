"""compressed-tensors' int-quantized and float-quantized: one byte a code, in the weight's own tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.scheme import Scheme, Stored


class OneByte(Layout):
    """`weight` int8 or float8 [N, K], `weight_scale` [R, G] ([1] for one scale), `weight_zero_point` int8 where asymmetric."""

    method = "compressed-tensors"
    integers = frozenset({"weight", "weight_zero_point"})

    def __init__(self, numbers: tuple[str, ...]) -> None:
        self.numbers = numbers

    def problem(self, scheme: Scheme) -> str | None:
        fits = scheme.number in self.numbers and scheme.bits == 8 and (scheme.number == "int" or scheme.symmetric)
        return None if fits else scheme.described

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        grid = _grid(scheme, rows, columns)
        found: dict[str, Entry] = {"weight": (scheme.code_dtype, (rows, columns)), "weight_scale": (scale_dtype, grid)}
        return found if scheme.symmetric else found | {"weight_zero_point": (torch.int8, grid)}

    def write(self, stored: Stored) -> dict[str, Tensor]:
        grid = _grid(stored.scheme, *stored.codes.shape)
        part = {"weight": stored.codes, "weight_scale": stored.scales.reshape(grid)}
        points = stored.zero_points
        return part if points is None else part | {"weight_zero_point": points.reshape(grid)}

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        codes = part["weight"]
        if codes.dtype != scheme.code_dtype:
            raise ArtifactError(
                f"codes of a quantized weight are {codes.dtype}, config.json's {scheme.number} needs {scheme.code_dtype}",
                fix="pair the weights with the config.json they were saved with",
            )
        grid = scheme.grid(*codes.shape)
        points = None if scheme.symmetric else part["weight_zero_point"].reshape(grid)
        return Stored(scheme, codes, part["weight_scale"].reshape(grid), points)


def _grid(scheme: Scheme, rows: int, columns: int) -> tuple[int, ...]:
    return (1,) if scheme.per_tensor else scheme.grid(rows, columns)
