"""AWQ's GEMM layout: 4-bit codes packed along the output features, eight to a word in an order of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.scheme import Scheme, Stored
from hone.ops import formats

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output feature, of every eight, in nibble 0 (the lowest) to 7 of a word."""


class AWQ(Layout):
    """`qweight` int32 [K, N/8], `qzeros` int32 [G, N/8], `scales` float16 [G, N]; weight = scale x (code - zero point).

    Values are unsigned; symmetric weights have zero point 8. Source: AutoAWQ, `awq/utils/packing_utils.py`.
    """

    method = "awq"
    integers = frozenset({"qweight", "qzeros"})

    def problem(self, scheme: Scheme) -> str | None:
        fits = scheme.number == "int" and scheme.bits == 4 and scheme.strategy in ("group", "channel")
        return None if fits else scheme.described

    def shape_problem(self, scheme: Scheme, rows: int, columns: int) -> str | None:
        return "rows and columns must be multiples of 32" if rows % 32 or columns % 32 else None

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        groups, words = scheme.num_groups(columns), formats.num_words(rows, 4)
        return {
            "qweight": (torch.int32, (columns, words)),
            "qzeros": (torch.int32, (groups, words)),
            "scales": (torch.float16, (groups, rows)),
        }

    def write(self, stored: Stored) -> dict[str, Tensor]:
        points = torch.zeros_like(stored.scales, dtype=torch.int8) if stored.zero_points is None else stored.zero_points
        return {"qweight": _pack(stored.codes), "qzeros": _pack(points), "scales": stored.scales.T.contiguous()}

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        if part["qweight"].dtype != torch.int32 or part["qzeros"].dtype != torch.int32:
            raise ArtifactError(
                f"codes of a quantized weight are {part['qweight'].dtype}, awq packs them in torch.int32",
                fix="pair the weights with the config.json they were saved with",
            )
        codes, points = _unpack(part["qweight"]), _unpack(part["qzeros"])
        if scheme.symmetric and bool(points.any()):
            raise ArtifactError(
                "qzeros has other zero points than the 8 of symmetric weights, which config.json says",
                fix="pair the weights with the config.json they were saved with",
            )
        return Stored(scheme, codes, part["scales"].T.contiguous(), None if scheme.symmetric else points)


def _pack(values: Tensor) -> Tensor:
    """Signed codes [N, C] as words [C, N/8]."""
    octets = values.T.reshape(values.shape[1], -1, 8)[..., list(ORDER)]
    return formats.pack(octets.flatten(1), 4)


def _unpack(words: Tensor) -> Tensor:
    """The inverse of `_pack`."""
    octets = formats.unpack(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
    back = [ORDER.index(feature) for feature in range(8)]
    return octets[..., back].flatten(1).T.contiguous()
