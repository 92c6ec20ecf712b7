"""LoRA: a product of two thin matrices beside each chosen linear, whose own weights are frozen.

Shapes: K input features, N output rows of a checkpoint module, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from hone.model.adapters.base import LinearAdapter
from hone.model.adapters.own_weights import PREFIX, OwnWeight, own_weights
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece

if TYPE_CHECKING:
    from torch import nn


ROWS = "token_rows"
"""The name of trained rows in hone's checkpoints, and their key in a PEFT folder."""
TOKEN_ROWS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"


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

    bias: Literal["none", "all", "lora_only"] = Field(
        "none", description="Biases of the model that are trained, too: of all linears, or of those that are wrapped."
    )
    modules_to_save: tuple[str, ...] = Field(
        (), description="Embedding, head or norms that are trained whole, by the end of their names."
    )
    trainable_token_indices: tuple[int, ...] = Field(
        (), description="Tokens whose rows of the embedding are trained, such as new ones; of a tied head, too."
    )
    ensure_weight_tying: bool = Field(
        True,
        description="Whether the head of a tied model stays its embedding where modules_to_save name one of them; false, as in PEFT: apart.",
    )

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

    @field_validator("trainable_token_indices")
    @classmethod
    def _tokens_are_named_once(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        if len({*ids}) < len(ids):
            raise ValueError("a token is named twice")
        return ids

    def check(self, config: Any) -> None:
        """As `LinearAdapter.check`, and where modules to save, biases or tokens are not there."""
        super().check(config)
        self.own_weights(config)
        if wrong := [token for token in self.trainable_token_indices if not 0 <= token < config.vocab_size]:
            raise ValueError(f"trainable_token_indices {wrong} are outside the vocabulary of {config.vocab_size}")
        if self.trainable_token_indices and any(one.part == "embed_tokens" for one in self.own_weights(config)):
            raise ValueError("trainable_token_indices are rows of a matrix that modules_to_save train whole")

    def own_weights(self, config: Any) -> list[OwnWeight]:
        return own_weights(self, config)

    def token_rows(self, config: Any) -> tuple[int, ...]:
        return self.trainable_token_indices

    def keys(self, config: Any) -> dict[str, str]:
        own = self.own_weights(config)
        found = {name: key for one in own for name, (key, _) in one.tensors.items()}
        return found | ({ROWS: TOKEN_ROWS} if self.trainable_token_indices else {})

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """The keys of its patterns that match none of the wrapped checkpoint `modules`."""
        keys, modules = {**self.rank_pattern, **self.alpha_pattern}, list(modules)
        return [key for key in keys if not any(by_pattern({key: True}, name, False) for name in modules)]

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
            "bias": self.bias,
            "modules_to_save": list(self.modules_to_save) or None,
            "trainable_token_indices": list(self.trainable_token_indices) or None,
            "ensure_weight_tying": bool(self.modules_to_save) and self.ensure_weight_tying,
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
        tokens = values.get("trainable_token_indices") or ()
        if isinstance(tokens, Mapping):
            if set(tokens) != {"embed_tokens"}:
                raise ValueError(f"trainable_token_indices are of {', '.join(tokens)}, not of embed_tokens alone")
            tokens = tokens["embed_tokens"]
        own = {"bias": values.get("bias") or "none", "modules_to_save": tuple(values.get("modules_to_save") or ())}
        own |= {"trainable_token_indices": tuple(tokens)}
        own |= {"ensure_weight_tying": bool(values.get("ensure_weight_tying"))} if own["modules_to_save"] else {}
        return {**options, **patterns, **own}

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
