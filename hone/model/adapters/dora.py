"""DoRA: LoRA for the direction of each output row of a weight, and a trained vector for its length.

Shapes: K input features, N output rows of a checkpoint module, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from hone.model.adapters.lora import LoRA
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece

if TYPE_CHECKING:
    from torch import Tensor, nn


class DoRA(LoRA):
    """y = m / n (W + s B A) x, n the length of each row of W + s B A, taken as a constant by the gradient; m begins as that of W. Liu et al. 2024, arXiv:2402.09353."""

    paper: ClassVar[str] = "arXiv:2402.09353"
    stored: ClassVar[dict[str, str]] = {**LoRA.stored, "lora_magnitude_vector": "lora_magnitude_vector"}

    @model_validator(mode="after")
    def _no_dropout(self) -> DoRA:
        if self.dropout:
            raise ValueError(
                "dropout does not work with dora, whose product with the frozen weight would be needed twice"
            )
        return self

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        lengths = (
            ParameterSpec(f"lora_magnitude_vector_{one.name}", (one.out_features,), (1.0, 0.0)) for one in pieces
        )
        return (*super().parameters(linear, pieces), *lengths)

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> nn.Module:
        from hone.model.adapters.dora_linear import DoRALinear

        return DoRALinear(self, inner.requires_grad_(False), linear, pieces)

    def start(self, module: nn.Module, first: Mapping[str, Tensor]) -> None:
        """The lengths are those of the rows of W, since B is zero."""
        module.start()

    def peft_values(self) -> dict[str, Any]:
        return super().peft_values() | {"use_dora": True}

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> DoRA | None:
        return cls.model_validate({"kind": "dora", **cls.options_of(values)}) if values.get("use_dora") else None
