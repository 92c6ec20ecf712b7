"""What a model is: sizes, and one (mixer, feed-forward) pair a layer; predicts its own parameters, FLOPs and cache bytes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
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

    @model_validator(mode="after")
    def _borrowers_have_a_source(self) -> ModelConfig:
        for index, layer in enumerate(self.layers):
            if not layer.mixer.borrows:
                continue
            source = self.source_of(index)
            if source is None:
                raise ValueError(f"layer {index} ('{layer.mixer.kind}') has no layer before it whose keys it could use")
            layer.mixer.check_source(self.layers[source].mixer)
        return self

    def source_of(self, index: int) -> int | None:
        """The layer whose keys and values layer `index` borrows: the nearest before it that lends; None for its own."""
        if not self.layers[index].mixer.borrows:
            return None
        return next((place for place in reversed(range(index)) if self.layers[place].mixer.lends), None)

    def must_be_causal(self, otherwise: str) -> None:
        """Raises SpecError naming the first layer whose mixer sees later tokens; `otherwise` says what follows from that."""
        for index, layer in enumerate(self.layers):
            if not layer.mixer.causal:
                raise SpecError(
                    f"layer {index} mixes with '{layer.mixer.kind}', which sees later tokens: {otherwise}",
                    fix="take a causal mixer for every layer; `hone techniques mixer` lists them",
                )

    def lends(self, index: int) -> bool:
        """Whether a later layer borrows the keys and values of layer `index`."""
        return any(self.source_of(later) == index for later in range(index + 1, self.num_layers))

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
                    mixing=layer.mixer.mixing(),
                    widths=layer.mixer.widths(self.hidden_size),
                    intermediate_size=layer.feed_forward.intermediate_size,
                    cache=layer.mixer.cache(),
                )
                for layer in self.layers
            ),
        )

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's forward pass, averaged over a causal sequence of `seq_len` tokens.

        Convention: a multiply-add is 2 FLOPs; every matrix product including the head counts, the embedding lookup
        and elementwise work do not; mixing counts what each mixer says (attention: what a token may see, (seq_len + 1) / 2
        tokens on average, fewer with a window). A training step costs 3 times this.
        """
        return self.facts().flops_per_token(seq_len)

    def state_bytes(self, seq_len: int, bytes_per_value: float = 2) -> float:
        """Bytes that all layers keep of a sequence of `seq_len` tokens to decode on from it."""
        return self.facts().state_values(seq_len) * bytes_per_value

    def kv_bytes_per_token(self, bytes_per_value: float = 2) -> float:
        """Bytes of one token's keys and values in the engine's pages, all layers, at `bytes_per_value` bytes a number."""
        return self.facts().kv_values_per_token * bytes_per_value
