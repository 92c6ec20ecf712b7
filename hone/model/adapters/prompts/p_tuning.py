"""P-tuning: embeddings before the first token, which an encoder makes in training and which are saved as plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from hone.model.adapters.initial import uniform
from hone.model.adapters.prompts.base import linear
from hone.model.adapters.prompts.prompt_tuning import EmbeddedPrompt
from hone.model.linear_spec import ParameterSpec

if TYPE_CHECKING:
    from torch import nn


class PTuning(EmbeddedPrompt):
    """n embeddings, made by an MLP or a bidirectional LSTM of two layers and an MLP. Liu et al. 2021, arXiv:2103.10385."""

    paper: ClassVar[str] = "arXiv:2103.10385"
    peft_type: ClassVar[str] = "P_TUNING"

    encoder_type: Literal["mlp", "lstm", "none"] = Field(
        "mlp",
        description="What makes the embeddings in training, which is not saved; none: they are trained themselves.",
    )
    encoder_hidden_size: int = Field(0, ge=0, description="Its width; 0: the model's hidden_size.")

    @property
    def encoded(self) -> bool:
        return self.encoder_type != "none"

    def prompt_parameters(self, config: Any) -> tuple[ParameterSpec, ...]:
        width = config.hidden_size
        hidden, first = self.encoder_hidden_size or width, super().prompt_parameters(config)
        if self.encoder_type == "mlp":
            return (*first, *linear("0", width, hidden), *linear("2", hidden, hidden), *linear("4", hidden, width))
        if self.encoder_type == "none":
            return first
        cells = [
            ParameterSpec(f"encoder.lstm.{kind}_l{layer}{way}", shape, uniform(hidden))
            for layer in range(2)
            for way in ("", "_reverse")
            for kind, shape in {
                "weight_ih": (4 * hidden, 2 * hidden if layer else width),
                "weight_hh": (4 * hidden, hidden),
                "bias_ih": (4 * hidden,),
                "bias_hh": (4 * hidden,),
            }.items()
        ]
        return (*first, *cells, *linear("head.0", 2 * hidden, 2 * hidden), *linear("head.2", 2 * hidden, width))

    def encoder(self, width: int, out: int) -> nn.Module | None:
        if not self.encoded:
            return None
        from hone.model.adapters.prompts.module import LSTMEncoder, mlp

        hidden = self.encoder_hidden_size or width
        return mlp(width, hidden, hidden, out) if self.encoder_type == "mlp" else LSTMEncoder(width, hidden, out)

    def plain(self) -> Self:
        return type(self)(kind="p_tuning", num_virtual_tokens=self.num_virtual_tokens, encoder_type="none")

    def peft_values(self) -> dict[str, Any]:
        return super().peft_values() | {"encoder_reparameterization_type": "MLP"}

    def peft_sizes(self, config: Any) -> dict[str, Any]:
        return super().peft_sizes(config) | {"encoder_hidden_size": self.encoder_hidden_size or config.hidden_size}
