"""NF4 and FP4: every weight to the nearest of 16 fixed values times the largest magnitude of its block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.compress.quantizers.base import Quantizer

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix
    from hone.model.quantized.scheme import Scheme


BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes of bitsandbytes."""


class NF4(Quantizer):
    """Rounds to the 16 values of NormalFloat, quantiles of a normal distribution. Dettmers et al. 2023, arXiv:2305.14314.

    Written bit for bit as bitsandbytes 0.50 writes it; there the last block of a matrix may be shorter, here all are whole.
    """

    paper: ClassVar[str] = "arXiv:2305.14314"
    number: ClassVar[str] = "nf4"

    block_size: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(
        64, description="Neighbouring weights of a row that share a scale; transformers' default is 64."
    )
    double_quant: bool = Field(
        False,
        description="Whether the scales are rounded to 8 bits, which saves 0.37 bits per weight with blocks of 64.",
    )

    def scheme(self, columns: int) -> Scheme:
        from hone.model.quantized.scheme import Scheme

        name = f"{self.number}-nested" if self.double_quant else self.number
        return Scheme(4, self.block_size, name, number=self.number)

    def stored_scale_dtype(self, checkpoint_dtype: Any) -> Any:
        return self.as_dtype("float32")

    def config_options(self, dtype: str) -> dict[str, Any]:
        return {"bnb_4bit_compute_dtype": dtype}

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.scale_dtype not in ("auto", "float32"):
            raise SpecError(
                f"{self.kind}: bitsandbytes stores float32 scales, not {self.scale_dtype}", fix="set scale_dtype=auto"
            )
        if columns % self.block_size:
            sizes = [str(size) for size in BLOCKS if columns % size == 0]
            raise SpecError(
                f"{self.kind}: blocks of {self.block_size} do not divide the {columns} input features of {name}",
                fix=f"use block_size {' or '.join(sizes)}" if sizes else "use kind=rtn with uneven=nearest",
            )
        super().check(name, rows, columns)

    def apply(self, matrix: Matrix) -> None:
        import torch

        from hone.model.quantized.layouts.bitsandbytes_4bit import quantize
        from hone.model.quantized.scheme import Stored

        weights = matrix.weight.float()
        dtype = torch.float32 if matrix.stored_dtype == torch.float64 else matrix.stored_dtype
        counts = list(matrix.modules or (len(weights),))
        scheme = self.scheme(weights.shape[1])
        found = [quantize(part, scheme, dtype) for part in weights.split(counts)]
        begins = [sum(counts[:index]) for index in range(len(counts))]
        matrix.stored = Stored(
            scheme,
            torch.cat([one.codes for one in found]),
            torch.cat([one.scales for one in found]),
            raw={begin: one.raw[0] for begin, one in zip(begins, found, strict=True)},
        )


class FP4(NF4):
    """Rounds to 16 floats with two exponent bits and one bit of mantissa, as bitsandbytes scales them. arXiv:2212.09720."""

    paper: ClassVar[str] = "arXiv:2212.09720"
    number: ClassVar[str] = "fp4"
