"""bitsandbytes' LLM.int8 layout: one byte a code, one scale a row."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.scheme import Scheme, Stored


class LLMInt8(Layout):
    """`weight` int8 [N, K], `SCB` float32 [N] the largest magnitude of each row, `weight_format` uint8 [] (0: by row).

    weight = code x SCB / 127. Source: bitsandbytes 0.50.2, `nn.Linear8bitLt`; Dettmers et al. 2022, arXiv:2208.07339.
    """

    method = "bitsandbytes"
    integers = frozenset({"weight", "weight_format"})

    def problem(self, scheme: Scheme) -> str | None:
        fits = scheme.number == "int" and scheme.bits == 8 and scheme.strategy == "channel" and scheme.symmetric
        return None if fits else scheme.described

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        return {
            "weight": (torch.int8, (rows, columns)),
            "SCB": (torch.float32, (rows,)),
            "weight_format": (torch.uint8, ()),
        }

    def write(self, stored: Stored) -> dict[str, Tensor]:
        return {"weight": stored.codes, "weight_format": torch.tensor(0, dtype=torch.uint8), **stored.raw[0]}

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        if part["weight"].dtype != torch.int8 or int(part["weight_format"]) != 0:
            raise ArtifactError(
                f"an LLM.int8 weight is {part['weight'].dtype} with weight_format {int(part['weight_format'])}, not "
                "torch.int8 by row (0)",
                fix="load and save it again with bitsandbytes 0.43 or newer",
            )
        return stored_rows(scheme, part["weight"], part["SCB"])


def stored_rows(scheme: Scheme, codes: Tensor, largest: Tensor) -> Stored:
    """Codes int8 [N, K] with the largest magnitude of each row, float32 [N], which is kept: division by 127 is inexact."""
    return Stored(scheme, codes, (largest / 127).unsqueeze(1), raw={0: {"SCB": largest}})
