"""What both sides of a program know: its fields and kinds of operations, and what it is compiled for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hone.ops.cpu.isa import cpu_isa
from hone.ops.linear.cpu_weights import STORED

FIELDS = 24
"""int64 values of an operation: its kind, 3 for its progress, and its arguments."""

KINDS = ("widen", "narrow", "operand", "norm", "product", "rope", "attend", "gate", "unpack", "quantize")
WEIGHTS = ("dense", "i8", "i8g", "i4", "i4s")
HEADER = 12


class Family(NamedTuple):
    """What a program is compiled for: the dtype of activations and dense weights in memory, and the arithmetic."""

    stored: str
    """f32, f16 or bf16."""
    isa: str
    """One of `isa.ISAS`."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> Family:
        """The fastest for activations of `dtype` on this machine."""
        return cls(STORED[dtype], cpu_isa())

    @property
    def pairs(self) -> bool:
        """Whether products of dense weights take bf16 operands (avx512_bf16), else float32 ones."""
        return self.isa == "avx512_bf16" and self.stored == "bf16"

    @property
    def operand(self) -> torch.dtype:
        """The dtype of the inputs of products."""
        return torch.bfloat16 if self.pairs else torch.float32
