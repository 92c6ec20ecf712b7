"""The recipes of fp8 training: which numbers share a scale, in which format gradients are, which products stay in bfloat16.

Names are torchao's (torchao.float8), but `blockwise`, which is that of DeepSeek-V3 (arXiv:2412.19437, 3.3). All scales are powers of two: dividing by one rounds nothing, so that codes are the
same bits on every device, and the only error of a cast is the rounding to eight bits.
"""

from __future__ import annotations

from typing import NamedTuple

MULTIPLE = 16
"""Rows, input and output features of an fp8 product are multiples of this: the tensor cores' 16 bytes."""


class Recipe(NamedTuple):
    """How a linear's three products y = x W^T, dx = dy W and dW = dy^T x are computed."""

    tensorwise: bool
    """One scale for a whole tensor; otherwise one for each row of a factor, and of its transpose where a product needs that."""
    gradient: str
    """The torch dtype of the codes of dy; x and W are float8_e4m3fn."""
    weight_gradient: bool
    """Whether dW is of codes; otherwise it is the bfloat16 product of x and dy."""
    fast: tuple[bool, bool, bool]
    """For each product whether sums stay in the tensor cores' accumulators of about 14 bits ('fast accumulation')."""
    blockwise: bool = False
    """One scale for each 128 numbers along the summed axis of x and dy, and for each 128 x 128 of W; sums of 128 are added in float32."""


RECIPES: dict[str, Recipe] = {
    # With scales of rows torchao takes fast accumulation for all: the slow form of its library's kernels is far slower.
    "rowwise": Recipe(False, "float8_e4m3fn", True, (True, True, True)),
    "rowwise_with_gw_hp": Recipe(False, "float8_e4m3fn", False, (True, True, False)),
    "tensorwise": Recipe(True, "float8_e5m2", True, (True, False, False)),
    "blockwise": Recipe(False, "float8_e4m3fn", True, (False, False, False), blockwise=True),
}
"""By name; 'gw_hp' is the weight's gradient in high precision."""
