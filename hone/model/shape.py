"""A model by its sizes, from which training starts; patterns of mixers and feed-forwards expand to a list of layers."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.base.table import Technique
from hone.model.config import FamilyName, LayerSpec, ModelConfig
from hone.model.families import FAMILIES
from hone.model.families.config_json import ACTIVATIONS, to_hf
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.mixers import MIXERS


class Shape(Spec):
    """A model by its sizes, before its vocabulary is known."""

    family: FamilyName = Field("llama", description="Architecture.")
    hidden_size: int = Field(192, gt=0, description="Width of the residual stream.")
    num_layers: int = Field(4, gt=0, description="Decoder layers.")
    num_heads: int = Field(6, gt=0, description="Query heads.")
    num_kv_heads: int = Field(6, gt=0, description="Key/value heads.")
    head_dim: int | None = Field(None, gt=0, description="Width of a head; hidden_size / num_heads when empty.")
    intermediate_size: int = Field(512, gt=0, description="Width of the feed-forward.")
    max_seq_len: int = Field(512, gt=0, description="Longest sequence, in tokens.")
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary wavelengths.")
    window: int | None = Field(None, gt=0, description="Sliding window, in tokens; empty for full attention.")
    norm_eps: float = Field(1e-5, gt=0, description="Added to the mean square in every norm.")
    tie_embeddings: bool = Field(True, description="Whether the output head shares the embedding's weights.")
    mixers: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="The layers' mixers: names or {kind: NAME, options}, repeated over the layers; empty: attention. "
        "A size that a mixer leaves out is the model's.",
    )

    feed_forward: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="The layers' feed-forwards, as mixers has it: names or {kind: NAME, options}, repeated over the layers; empty: "
        "the family's. One without intermediate_size has the model's.",
    )
    num_dense_layers: int = Field(
        0,
        ge=0,
        description="First layers whose feed-forward is the family's dense one, before those of feed_forward (DeepSeek's "
        "first_k_dense_replace).",
    )

    @field_validator("mixers")
    @classmethod
    def _mixers_exist(cls, mixers: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
        for entry in mixers:
            kind = entry if isinstance(entry, str) else entry.get("kind")
            if kind not in MIXERS.rows:
                raise ValueError(f"there is no mixer {kind!r}; the mixers are: {', '.join(MIXERS.rows)}")
        return mixers

    @field_validator("feed_forward")
    @classmethod
    def _feed_forwards_exist(cls, given: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
        for entry in given:
            kind = entry if isinstance(entry, str) else entry.get("kind")
            if kind not in FEED_FORWARDS.rows:
                raise ValueError(f"there is no feed-forward {kind!r}; they are: {', '.join(FEED_FORWARDS.rows)}")
        return given

    @model_validator(mode="after")
    def _layers_fit(self) -> Shape:
        """Checked here and not only in `config`, so that a recipe's last stage fails before its first one runs.

        Only for patterns, whose options may not fit: reading them imports torch, which takes a second.
        """
        if self.mixers or self.feed_forward or self.num_dense_layers:
            self.config(vocab_size=1)
        return self

    def config(self, vocab_size: int, bos: int | None = None, eos: int | tuple[int, ...] | None = None) -> ModelConfig:
        """The model of this shape over `vocab_size` tokens.

        Raises SpecError when the sizes do not fit together or, without patterns, the family cannot store such a model.
        A trained model can then always be saved.
        """
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise SpecError(
                f"hidden_size {self.hidden_size} is no multiple of num_heads {self.num_heads}",
                fix="change one of them, or set head_dim",
            )
        if self.num_dense_layers > self.num_layers:
            raise SpecError(
                f"num_dense_layers is {self.num_dense_layers}, num_layers is {self.num_layers}",
                fix="lower num_dense_layers, or raise num_layers",
            )
        for name, pattern in {"mixers": self.mixers, "feed_forward": self.feed_forward}.items():
            if len(pattern) > self.num_layers:
                raise SpecError(
                    f"{name} names {len(pattern)} layers, num_layers is {self.num_layers}",
                    fix="leave some out, or raise num_layers",
                )
        family = FAMILIES[self.family]
        mixers = self._layer_mixers()
        if family.latent is not None:
            mixers = [family.latent.full(one, self.norm_eps) if one.kind == "mla" else one for one in mixers]
        layers = [
            LayerSpec.read({"mixer": mixer, "feed_forward": feed_forward, **family.layer})
            for mixer, feed_forward in zip(mixers, self._layer_feed_forwards(), strict=True)
        ]
        scaled = {"embedding_multiplier": self.hidden_size**0.5} if family.embedding_sqrt else {}
        config = ModelConfig.read(
            {
                "family": self.family,
                "vocab_size": vocab_size,
                "hidden_size": self.hidden_size,
                "layers": layers,
                "norm_eps": self.norm_eps,
                "tie_embeddings": self.tie_embeddings,
                "max_seq_len": self.max_seq_len,
                "bos_token_id": bos,
                "eos_token_ids": [] if eos is None else [eos] if isinstance(eos, int) else eos,
                **family.model,
                **scaled,
            }
        )
        if not (self.mixers or self.feed_forward):
            to_hf(config)
        return config

    def _layer_feed_forwards(self) -> list[Technique]:
        """One feed-forward for each layer: dense ones, then those of `feed_forward` in turn, else the family's."""
        family = FAMILIES[self.family]
        dense = ACTIVATIONS[family.defaults.get(family.activation, "silu")]
        pattern = self.feed_forward or (dense if family.experts is None else family.experts.usual,)
        options = [{"kind": entry} if isinstance(entry, str) else entry for entry in (dense, *pattern)]
        first, *read = [FEED_FORWARDS.read({"intermediate_size": self.intermediate_size, **entry}) for entry in options]
        rest = self.num_layers - self.num_dense_layers
        return [first] * self.num_dense_layers + [read[index % len(read)] for index in range(rest)]

    def _layer_mixers(self) -> list[Technique]:
        """One mixer for each layer: those of `mixers` in turn, with this shape's sizes for fields they leave out."""
        family = FAMILIES[self.family]
        sizes = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_heads,
            "rope": {"theta": self.rope_theta},
            "qkv_bias": family.qkv_bias,
            "qk_norm": family.qk_norm,
            "max_seq_len": self.max_seq_len,
            **family.mixer,
        }
        if not self.mixers:
            usual = "attention" if family.latent is None else "mla"
            window = {} if self.window is None else {"window": self.window}
            return [MIXERS.read({"kind": usual, **sizes_of(usual, sizes), **window})] * self.num_layers
        chosen: list[Technique] = []
        for index in range(self.num_layers):
            entry = self.mixers[index % len(self.mixers)]
            options = {"kind": entry} if isinstance(entry, str) else entry
            kind = options["kind"]
            known = dict(sizes)
            if self.window is not None and kind != "attention":  # in a pattern, `attention` is full attention
                known["window"] = self.window
            if MIXERS[kind].reuses_kv and (source := next((one for one in reversed(chosen) if one.can_share_kv), None)):
                known |= {name: getattr(source, name) for name in ("head_dim", "rope", "window", "qk_norm")}
            chosen.append(MIXERS.read({**sizes_of(kind, known), **options}))
        return chosen


def sizes_of(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The `sizes` that are fields of mixer `kind`."""
    return {name: value for name, value in sizes.items() if name in MIXERS[kind].model_fields}
