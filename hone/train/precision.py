"""Precision policy: the dtypes of the computation and of the saved weights, and the loss scale that fp16 needs.

- fp32: everything in float32.
- bf16: the model's weights, activations and gradients are bfloat16; the optimizer holds float32 master weights and
    moments and copies the rounded masters back after every step. No autocast: dtypes stay visible in the code.
- fp16: as bf16, with the loss multiplied by a power of two so that small gradients do not underflow, the gradients divided
    by it in float32, and a step skipped when they overflow (Micikevicius et al. 2017, arXiv:1710.03740).
- fp8: as bf16, with the products of the layers' linears, forward and backward, of fp8 codes with a scale for each row
    (Micikevicius et al. 2022, arXiv:2209.05433; the recipes are those of torchao, see hone/ops/fp8/recipes.py).
    fp8_tensorwise has one scale a tensor, fp8_rowwise_with_gw_hp the gradient of the weight in bf16, fp8_blockwise a scale for
    each 128 numbers, of weights for each 128 x 128 (DeepSeek-AI 2024, arXiv:2412.19437).

Norms, softmax, the loss and the accumulation of gradients over micro-batches are float32 everywhere.
"""

from __future__ import annotations

from typing import Literal, cast

from hone.base.errors import FitError
from hone.train.fp8.techniques import FP8

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp8_tensorwise", "fp8_rowwise_with_gw_hp", "fp8_blockwise"]
ExportDtype = Literal["float32", "bfloat16", "float16"]
FP8_RECIPES: dict[Precision, str] = {cast(Precision, name): one.recipe for name, one in FP8.items()}
"""The recipe of hone.ops.fp8 for each precision that has one."""

TORCH_NAMES: dict[Precision, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    **dict.fromkeys(FP8_RECIPES, "bfloat16"),
}
"""The dtype of weights, activations and gradients as torch names it. The peak of MFU is that of its products, in fp8 too."""

GROWTH_INTERVAL = 1000
INITIAL_SCALE = 2.0**16


def saved_dtype(precision: Precision, export_dtype: ExportDtype | None, *, adapted: bool = False) -> str:
    """The dtype of the saved weights, as torch names it; of an adapter, which is small, that of its masters, as PEFT saves it."""
    return export_dtype or ("float32" if adapted else TORCH_NAMES[precision])


class LossScaler:
    """Dynamic loss scale: halved when gradients overflow, doubled after `growth_interval` good steps in a row.

    `scale` is 1 and stays 1 unless `enabled` (only fp16 needs it: bf16 has float32's exponent range).
    """

    def __init__(self, *, enabled: bool, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    def overflowed(self) -> None:
        """To be called when the step's gradients were not finite and it is skipped. Raises FitError when the scale cannot be halved."""
        assert self.enabled, "only a scaled loss may overflow"
        self.scale /= 2
        self.good_steps = 0
        if self.scale < 2.0**-14:
            raise FitError(
                f"fp16 gradients overflow even at a loss scale of {self.scale:g}",
                fix="use precision: bf16, or a lower learning rate",
            )

    def passed(self) -> None:
        """To be called when the step's gradients were finite."""
        self.good_steps += 1
        if self.enabled and self.good_steps >= self.growth_interval:
            self.scale = min(self.scale * 2, 2.0**24)
            self.good_steps = 0

    def state(self) -> dict[str, float]:
        """The numbers to store in a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Restores the result of `state`."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
