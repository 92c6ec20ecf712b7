"""LoRA: a product of two thin matrices beside each chosen linear, whose own weights are frozen.

Shapes: K input features, N output rows of a checkpoint module, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from hone.model.adapters.base import LinearAdapter
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece

if TYPE_CHECKING:
    from torch import nn


class LoRA(LinearAdapter):
    """y = W x + (alpha / rank) B A x: A [r, K] uniform and B [N, r] zero at first. Hu et al. 2021, arXiv:2106.09685."""

    paper: ClassVar[str] = "arXiv:2106.09685"

    rank: int = Field(16, gt=0, description="Rows of A, for each checkpoint module (PEFT's r).")
    alpha: float = Field(32.0, gt=0, description="B A is multiplied by alpha / rank (PEFT's lora_alpha).")
    use_rslora: bool = Field(False, description="By alpha / sqrt(rank) instead, for high ranks (arXiv:2312.03732).")
    loraplus_lr_ratio: float = Field(
        1.0, gt=0, description="Learning rate of B over that of A; LoRA+: 16 (arXiv:2402.12354)."
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of inputs that the factors do not see in a training step."
    )
    rank_pattern: dict[str, int] = Field(
        default_factory=dict, description="Other ranks, by the end of a module's name or a regular expression of it."
    )
    alpha_pattern: dict[str, float] = Field(default_factory=dict, description="Other alphas, by the same.")

    stored: ClassVar[dict[str, str]] = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
    peft_type: ClassVar[str] = "LORA"

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _patterns_are_usable(cls, pattern: dict[str, float]) -> dict[str, float]:
        for name, value in pattern.items():
            if not value > 0:
                raise ValueError(f"{name!r} has {value}: give a number above 0")
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"{name!r} is no regular expression: {error}") from None
        return pattern

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @property
    def varies(self) -> bool:
        """Whether pieces of one linear differ, or it has dropout: `hone.model.adapters.lora_varied` computes those."""
        return bool(self.rank_pattern or self.alpha_pattern or self.dropout)

    def of_piece(self, name: str) -> LoRA:
        """That of piece `name` alone, of an adapter that `around` made."""
        rank, alpha = self.rank_pattern.get(name, self.rank), self.alpha_pattern.get(name, self.alpha)
        return self.model_copy(update={"rank": rank, "alpha": alpha, "rank_pattern": {}, "alpha_pattern": {}})

    def around(self, modules: Mapping[str, str]) -> LoRA:
        """As `Adapter.around`: patterns by piece; none where all of them have the same rank and alpha."""
        if not (self.rank_pattern or self.alpha_pattern):
            return self
        ranks = {piece: by_pattern(self.rank_pattern, name, self.rank) for piece, name in modules.items()}
        alphas = {piece: by_pattern(self.alpha_pattern, name, self.alpha) for piece, name in modules.items()}
        found = self.model_copy(update={"rank_pattern": ranks, "alpha_pattern": alphas})
        alike = len({*ranks.values()}) == len({*alphas.values()}) == 1
        return found.of_piece(next(iter(modules))) if alike else found

    def lr_factor(self, name: str) -> float:
        """LoRA+: of B the ratio."""
        return self.loraplus_lr_ratio if "lora_B_" in name else 1.0

    def peft_values(self) -> dict[str, Any]:
        """r, lora_alpha and what changes them."""
        alphas = {name: whole(value) for name, value in self.alpha_pattern.items()}
        patterns = {"rank_pattern": self.rank_pattern, "alpha_pattern": alphas}
        return {
            "r": self.rank,
            "lora_alpha": whole(self.alpha),
            "use_rslora": self.use_rslora,
            "use_dora": False,
            "lora_dropout": self.dropout,
            **patterns,
        }

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> LoRA | None:
        """Of a folder with r and lora_alpha; without DoRA."""
        return None if values.get("use_dora") else cls.model_validate({"kind": "lora", **cls.options_of(values)})

    @staticmethod
    def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
        """The options in adapter_config.json: the dropout of a finished training is none."""
        options = {"rank": values["r"], "alpha": values["lora_alpha"], "use_rslora": bool(values.get("use_rslora"))}
        patterns = {name: values.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
        return {**options, **patterns}

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        from hone.model.adapters.lora_linear import uniform

        width, ranks = linear.in_features, [self.of_piece(one.name).rank for one in pieces]
        downs = [
            ParameterSpec(f"lora_A_{one.name}", (rank, width), uniform, multiplied=True)
            for one, rank in zip(pieces, ranks, strict=True)
        ]
        ups = [
            ParameterSpec(f"lora_B_{one.name}", (one.out_features, rank), (0.0, 0.0), multiplied=True)
            for one, rank in zip(pieces, ranks, strict=True)
        ]
        return (*downs, *ups)

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> nn.Module:
        from hone.model.adapters.lora_linear import LoRALinear
        from hone.model.adapters.lora_varied import VariedLoRALinear

        module = VariedLoRALinear if self.varies else LoRALinear
        return module(self, inner.requires_grad_(False), linear, pieces)


def by_pattern(pattern: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first key of a rank_pattern or alpha_pattern that is `module` or an end of it, as PEFT matches them."""
    return next((value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module)), otherwise)


def whole(value: float) -> float:
    """`value` as an integer where it is one, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value
