"""GPTQ's layout, versions 1 and 2: codes packed along the input features, zero points along the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.scheme import Scheme, Stored
from hone.ops import formats


class GPTQ(Layout):
    """`qweight` int32 [words of K codes, N], `qzeros` int32 [G, words of N zero points], `scales` float16 [G, N], `g_idx`
    int32 [K]: the group of each column. Values are unsigned, least significant bit first, across word borders.

    Symmetric weights have zero point 2^(bits-1). Version 1 stores zero points less 1 and so has none for zero: readers
    differ on what its largest value means, so it is refused in both directions.
    Source: IST-DASLab/gptq; GPTQModel 7.7, `gptqmodel.utils.model.convert_gptq_v1_to_v2_format`.
    """

    method = "gptq"
    integers = frozenset({"qweight", "qzeros", "g_idx"})

    def __init__(self, subtracted: int) -> None:
        self.subtracted = subtracted

    def problem(self, scheme: Scheme) -> str | None:
        fits = scheme.number == "int" and scheme.bits in (2, 3, 4, 8) and scheme.strategy in ("group", "channel")
        return None if fits else scheme.described

    def shape_problem(self, scheme: Scheme, rows: int, columns: int) -> str | None:
        return "rows and columns must be multiples of 32" if rows % 32 or columns % 32 else None

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        groups = scheme.num_groups(columns)
        return {
            "qweight": (torch.int32, (formats.num_words(columns, scheme.bits), rows)),
            "qzeros": (torch.int32, (groups, formats.num_words(rows, scheme.bits))),
            "scales": (torch.float16, (groups, rows)),
            "g_idx": (torch.int32, (columns,)),
        }

    def write(self, stored: Stored) -> dict[str, Tensor]:
        scheme, index = stored.scheme, stored.index
        points = torch.zeros_like(stored.scales, dtype=torch.int8) if stored.zero_points is None else stored.zero_points
        if self.subtracted and bool((points == formats.code_range(scheme.bits)[0]).any()):
            raise SpecError("gptq stores zero points less 1, and some are 0", fix="use layout gptq_v2")
        return {
            "qweight": formats.pack(stored.codes, scheme.bits).T.contiguous(),
            "qzeros": formats.pack((points - self.subtracted).T.contiguous(), scheme.bits),
            "scales": stored.scales.T.contiguous(),
            # A copy: the modules of a fused linear have one index, and a file must not share memory between tensors.
            "g_idx": _by_position(scheme, stored.codes) if index is None else index.clone(),
        }

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        codes = formats.unpack(_words(part["qweight"]).T.contiguous(), scheme.bits, columns)
        points = formats.unpack(_words(part["qzeros"]), scheme.bits, len(codes))
        if self.subtracted and not scheme.symmetric and bool((points == formats.code_range(scheme.bits)[1]).any()):
            raise ArtifactError(
                f"a zero point is stored as {(1 << scheme.bits) - 1} by gptq version 1, which libraries read differently",
                fix="quantize with sym=true, or convert the checkpoint to checkpoint_format gptq_v2",
            )
        zero_points = None if scheme.symmetric else (points + self.subtracted).T.contiguous()
        if scheme.symmetric and bool((points != -self.subtracted).any()):
            raise ArtifactError(
                "qzeros has other zero points than those of symmetric weights, which config.json's sym says",
                fix="pair the weights with the config.json they were saved with",
            )
        index: Tensor | None = part["g_idx"].to(torch.int32)
        if torch.equal(index, _by_position(scheme, codes)):
            index = None
        elif not scheme.permuted:
            raise ArtifactError(
                "g_idx permutes the columns, but config.json says desc_act false",
                fix="pair the weights with the config.json they were saved with",
            )
        elif int(index.min()) < 0 or int(index.max()) >= scheme.num_groups(columns):
            raise ArtifactError("g_idx names a group that has no scales", fix="quantize the model again")
        return Stored(scheme, codes, part["scales"].T.contiguous(), zero_points, index)


def _by_position(scheme: Scheme, codes: Tensor) -> Tensor:
    """The group of each column of codes [N, K] where groups are runs of neighbours."""
    columns = codes.shape[1]
    return torch.arange(columns, dtype=torch.int32, device=codes.device) // scheme.extent(1, columns)[1]


def _words(packed: Tensor) -> Tensor:
    if packed.dtype != torch.int32:
        raise ArtifactError(
            f"codes of a quantized weight are {packed.dtype}, gptq packs them in torch.int32",
            fix="convert the checkpoint to words of 32 bits (pack_dtype int32)",
        )
    return packed
