"""The fp8 precisions as techniques: which numbers of a linear's factors share a scale, and the recipe of hone.ops.fp8 of each."""

from __future__ import annotations

from typing import ClassVar

from hone.base.table import Technique


class Fp8(Technique):
    """The products of the layers' linears, forward and backward, are of codes of eight bits."""

    recipe: ClassVar[str]
    """Its name in `hone.ops.fp8.recipes`."""
    products: ClassVar[int] = 3
    """How many of the forward product and the gradients of input and weight are of codes."""
    experts: ClassVar[bool] = False
    """Whether a mixture's experts compute in fp8 too, which they do with scales of rows."""


class Rowwise(Fp8):
    """A scale for each row of a factor, e4m3 throughout, as torchao. Micikevicius et al. 2022, arXiv:2209.05433."""

    paper: ClassVar[str] = "arXiv:2209.05433"
    recipe: ClassVar[str] = "rowwise"
    experts: ClassVar[bool] = True


class RowwiseWithGwHp(Fp8):
    """As `fp8`, with the weight's gradient in bfloat16, as torchao. Micikevicius et al. 2022, arXiv:2209.05433."""

    paper: ClassVar[str] = "arXiv:2209.05433"
    recipe: ClassVar[str] = "rowwise_with_gw_hp"
    products: ClassVar[int] = 2
    experts: ClassVar[bool] = True


class Tensorwise(Fp8):
    """One scale for a factor, gradients in e5m2. Micikevicius et al. 2022, arXiv:2209.05433."""

    paper: ClassVar[str] = "arXiv:2209.05433"
    recipe: ClassVar[str] = "tensorwise"


class Blockwise(Fp8):
    """A scale for each 128 numbers along the sum, for each 128 x 128 of a weight. DeepSeek-AI 2024, arXiv:2412.19437."""

    paper: ClassVar[str] = "arXiv:2412.19437"
    recipe: ClassVar[str] = "blockwise"


FP8: dict[str, type[Fp8]] = {
    "fp8": Rowwise,
    "fp8_tensorwise": Tensorwise,
    "fp8_rowwise_with_gw_hp": RowwiseWithGwHp,
    "fp8_blockwise": Blockwise,
}
"""By the value of `precision`: what `hone.train.FP8_PRECISIONS` lists, for modules that its techniques import."""
