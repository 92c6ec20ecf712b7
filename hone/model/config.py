"""What a model is: sizes, and one (mixer, feed-forward) pair a layer; predicts its own parameters, FLOPs and cache bytes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.cost.facts import LayerFacts, ModelFacts
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.mixers import MIXERS


class LayerSpec(Spec):
    """One decoder layer: x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    mixer: Annotated[Technique, Choice(MIXERS)] = Field(description="How tokens see each other.")
    feed_forward: Annotated[Technique, Choice(FEED_FORWARDS)] = Field(description="What each token does alone.")


class ModelConfig(Spec):
    """A decoder as data. Layers may differ from each other: a hybrid stack is a list like any other."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = Field(
        "llama", description="Whose checkpoint format it is saved in."
    )
    vocab_size: int = Field(gt=0, description="Rows of the embedding.")
    hidden_size: int = Field(gt=0, description="Width of the residual stream.")
    layers: tuple[LayerSpec, ...] = Field(min_length=1, description="The layers, first to last.")
    norm_eps: float = Field(1e-5, gt=0, description="Added to the mean square in every RMS norm.")
    tie_embeddings: bool = Field(False, description="Whether the head is the embedding.")
    max_seq_len: int = Field(2048, gt=0, description="Longest sequence it was made for, in tokens.")
    bos_token_id: int | None = Field(None, description="Token a sequence begins with, if any.")
    eos_token_ids: tuple[int, ...] = Field((), description="Tokens that end a sequence.")

    @model_validator(mode="after")
    def _tokens_exist(self) -> ModelConfig:
        for token in (*self.eos_token_ids, *([] if self.bos_token_id is None else [self.bos_token_id])):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_params(self) -> int:
        """Parameters, exactly; a tied head counts once."""
        inner = sum(
            layer.mixer.num_params(self.hidden_size)
            + layer.feed_forward.num_params(self.hidden_size)
            + 2 * self.hidden_size
            for layer in self.layers
        )
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2) + self.hidden_size
        return inner + ends

    def facts(self) -> ModelFacts:
        """The plain numbers that the cost room works with."""
        return ModelFacts(
            num_params=self.num_params,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_seq_len=self.max_seq_len,
            tie_embeddings=self.tie_embeddings,
            layers=tuple(
                LayerFacts(
                    matmuls=(
                        *layer.mixer.matmuls(self.hidden_size),
                        *layer.feed_forward.matmuls(self.hidden_size),
                    ),
                    num_heads=layer.mixer.num_heads,
                    num_kv_heads=layer.mixer.num_kv_heads,
                    head_dim=layer.mixer.head_dim,
                    intermediate_size=layer.feed_forward.intermediate_size,
                    window=layer.mixer.window,
                )
                for layer in self.layers
            ),
        )

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's forward pass, averaged over a causal sequence of `seq_len` tokens.

        Convention: a multiply-add is 2 FLOPs; every matrix product including the head counts, the embedding lookup
        and elementwise work do not; attention counts only what a token may see, (seq_len + 1) / 2 tokens on average
        (causal-halved), fewer with a window. A training step costs 3 times this.
        """
        return self.facts().flops_per_token(seq_len)

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> float:
        """Cache bytes for one token in all layers when a number takes `bytes_per_value` bytes."""
        return self.facts().kv_values_per_token * bytes_per_value
