"""Prompt tuning: trained embeddings before the first token of every document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hone.model.adapters.prompts.base import SoftPrompt
from hone.model.linear_spec import ParameterSpec

if TYPE_CHECKING:
    from torch import nn


class EmbeddedPrompt(SoftPrompt):
    """Base of the soft prompts that are embeddings."""

    def check(self, config: Any) -> None:
        """As `SoftPrompt.check`; models whose embeddings are multiplied differ in whether a prompt's are."""
        super().check(config)
        if config.embedding_multiplier != 1.0:
            raise ValueError(f"the model multiplies embeddings, and a '{self.kind}' is one: take kind: prefix")

    def prompt_parameters(self, config: Any) -> tuple[ParameterSpec, ...]:
        return (ParameterSpec("embedding", (self.num_virtual_tokens, config.hidden_size), (0.0, 1.0)),)

    def prompt(self, config: Any) -> nn.Module:
        from hone.model.adapters.prompts.module import Embeddings

        width = config.hidden_size
        return Embeddings((self.num_virtual_tokens, width), self.encoder(width, width))

    def peft_sizes(self, config: Any) -> dict[str, Any]:
        heads = {"num_attention_heads": config.layers[0].mixer.num_heads}
        return super().peft_sizes(config) | heads


class PromptTuning(EmbeddedPrompt):
    """n trained embeddings, which begin as rows of the vocabulary. Lester et al. 2021, arXiv:2104.08691."""

    paper: ClassVar[str] = "arXiv:2104.08691"
    peft_type: ClassVar[str] = "PROMPT_TUNING"

    init: Literal["vocabulary", "text", "random"] = Field(
        "vocabulary",
        description="First values: embeddings of tokens drawn from the vocabulary, of init_text, or normal with deviation 1.",
    )
    init_text: str = Field("", description="Text of init: text, repeated or cut to num_virtual_tokens tokens.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.init == "text") != bool(self.init_text):
            raise ValueError("init: text and init_text belong together")
        return self

    def start(self, module: nn.Module, first: Any) -> None:
        """The embeddings of tokens, drawn by `seed` or those of the text."""
        if self.init == "random":
            return
        count = self.num_virtual_tokens
        ids = first.tokens(self.init_text, count) if self.init == "text" else first.drawn(count)
        module.embedding.data.copy_(first.rows(ids))

    def plain(self) -> Self:
        return type(self)(kind="prompt_tuning", num_virtual_tokens=self.num_virtual_tokens)
