"""Prefix tuning: trained keys and values of a few places before the tokens, in every layer; P-tuning v2 is the same without an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hone.model.adapters.prompts.base import SoftPrompt, linear
from hone.model.linear_spec import ParameterSpec

if TYPE_CHECKING:
    from torch import nn


class Prefix(SoftPrompt):
    """n keys and values a layer, which every token attends to beside those of its document. Li and Liang 2021, arXiv:2101.00190."""

    paper: ClassVar[str] = "arXiv:2101.00190"
    peft_type: ClassVar[str] = "PREFIX_TUNING"

    init: Literal["random", "zero", "text"] = Field(
        "random",
        description="First values: small random ones; zero, which an MLP can leave; or keys and values of init_text, with which training begins as if the text stood before every document.",
    )
    init_text: str = Field("", description="Text of init: text, repeated or cut to num_virtual_tokens tokens.")
    encoder_hidden_size: int = Field(
        0, ge=0, description="Width of the MLP that makes keys and values in training, which is not saved; 0: none."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.init == "text") != bool(self.init_text):
            raise ValueError("init: text and init_text belong together")
        if self.init == "zero" and not self.encoder_hidden_size:
            raise ValueError("init: zero makes all places alike, and equal gradients keep them so: take random or text")
        if self.init == "text" and self.encoder_hidden_size:
            raise ValueError("init: text gives keys and values, which no MLP begins with: set encoder_hidden_size: 0")
        return self

    @property
    def encoded(self) -> bool:
        return self.encoder_hidden_size > 0

    def check(self, config: Any) -> None:
        """As `SoftPrompt.check`; all layers need equal heads, because a folder stores one tensor for all of them."""
        super().check(config)
        if len({(layer.mixer.num_kv_heads, layer.mixer.head_dim) for layer in config.layers}) > 1:
            raise ValueError(f"layers have key and value heads of different sizes, which '{self.kind}' does not store")

    def prompt_parameters(self, config: Any) -> tuple[ParameterSpec, ...]:
        width = _width(config)
        whole, hidden = 2 * config.num_layers * width, self.encoder_hidden_size
        if not hidden:
            return (ParameterSpec("embedding", (self.num_virtual_tokens, whole)),)
        return (
            ParameterSpec("embedding", (self.num_virtual_tokens, width), (0.0, 1.0)),
            *linear("0", width, hidden),
            *linear("2", hidden, whole, zero=self.init == "zero"),
        )

    def encoder(self, width: int, out: int) -> nn.Module | None:
        if not self.encoded:
            return None
        from torch.nn import Linear, Sequential, Tanh

        return Sequential(Linear(width, self.encoder_hidden_size), Tanh(), Linear(self.encoder_hidden_size, out))

    def prompt(self, config: Any) -> nn.Module:
        from hone.model.adapters.prompts.module import KeysAndValues

        width, whole = _width(config), 2 * config.num_layers * _width(config)
        mixer = config.layers[0].mixer
        encoder = self.encoder(width, whole)
        sizes = (self.num_virtual_tokens, whole if encoder is None else width)
        return KeysAndValues(sizes, encoder, (mixer.num_kv_heads, mixer.head_dim))

    def start(self, module: nn.Module, first: Any) -> None:
        """With init: text the keys and values of the text in every layer."""
        if self.init == "text":
            ids = first.tokens(self.init_text, self.num_virtual_tokens)
            module.embedding.data.copy_(first.keys_and_values(ids, module.embedding.device))

    def plain(self) -> Self:
        return type(self)(kind=self.kind or "prefix", num_virtual_tokens=self.num_virtual_tokens)

    def peft_sizes(self, config: Any) -> dict[str, Any]:
        """PEFT's num_attention_heads and token_dim are those of keys and values."""
        sizes = {"token_dim": _width(config), "num_attention_heads": config.layers[0].mixer.num_kv_heads}
        return super().peft_sizes(config) | sizes | {"prefix_projection": False, "encoder_hidden_size": None}


class PTuningV2(Prefix):
    """Prefix tuning of every layer, without an encoder. Liu et al. 2021, arXiv:2110.07602."""

    paper: ClassVar[str] = "arXiv:2110.07602"

    @model_validator(mode="after")
    def _no_encoder(self) -> Self:
        if self.encoder_hidden_size:
            raise ValueError("p_tuning_v2 has no encoder: set encoder_hidden_size: 0, or take kind: prefix")
        return self

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> SoftPrompt | None:
        """None: it is saved as a prefix."""
        return None


def _width(config: Any) -> int:
    """Numbers of a key in all heads of a layer."""
    mixer = config.layers[0].mixer
    return mixer.num_kv_heads * mixer.head_dim
