"""Model families: shapes by name, and the translation between a Hugging Face config.json and a `ModelConfig`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hone.base.errors import SpecError
from hone.base.identity import difference
from hone.base.spec import Spec
from hone.base.table import Technique
from hone.model.config import LayerSpec, ModelConfig
from hone.model.mixers import MIXERS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


OWN = "hone"
"""The model_type of folders in hone's own format."""


class Shape(Spec):
    """A model by its sizes, before its vocabulary is known."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = Field("llama", description="Architecture.")
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
    tie_embeddings: bool = Field(True, description="Whether the head is the embedding.")
    mixers: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="How layers mix tokens: names or {kind: NAME, options}, repeated over the layers; empty: attention. "
        "Sizes a mixer leaves out are those above.",
    )

    @field_validator("mixers")
    @classmethod
    def _mixers_exist(cls, mixers: tuple[str | dict[str, Any], ...]) -> tuple[str | dict[str, Any], ...]:
        for entry in mixers:
            kind = entry if isinstance(entry, str) else entry.get("kind")
            if kind not in MIXERS.rows:
                raise ValueError(f"there is no mixer {kind!r}; the mixers are: {', '.join(MIXERS.rows)}")
        return mixers

    @model_validator(mode="after")
    def _layers_fit(self) -> Shape:
        """Here and not only in `config`: a recipe's last stage is read before its first one runs.

        A pattern of mixers only: theirs are the options that may not fit, and to read them takes torch, a second.
        """
        if self.mixers:
            self.config(vocab_size=1)
        return self

    def config(self, vocab_size: int, bos: int | None = None, eos: int | tuple[int, ...] | None = None) -> ModelConfig:
        """The model of this shape over `vocab_size` tokens.

        Raises SpecError when the sizes do not fit together or, without `mixers`, the family has no such model: better now
        than when a trained one is saved.
        """
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise SpecError(
                f"hidden_size {self.hidden_size} is no multiple of num_heads {self.num_heads}",
                fix="change one of them, or set head_dim",
            )
        if len(self.mixers) > self.num_layers:
            raise SpecError(
                f"mixers names {len(self.mixers)} layers, num_layers is {self.num_layers}",
                fix="leave some out, or raise num_layers",
            )
        feed_forward = {"kind": "swiglu", "intermediate_size": self.intermediate_size}
        layers = [LayerSpec.read({"mixer": mixer, "feed_forward": feed_forward}) for mixer in self._layer_mixers()]
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
            }
        )
        if not self.mixers:
            to_hf(config)
        return config

    def _layer_mixers(self) -> list[Technique]:
        """One mixer a layer: those of `mixers` in turn, with this shape's sizes where they have such fields."""
        sizes = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_heads,
            "rope": {"theta": self.rope_theta},
            "qkv_bias": self.family == "qwen2",
            "qk_norm": self.family == "qwen3",
            "max_seq_len": self.max_seq_len,
        }
        if not self.mixers:
            return [MIXERS.read({"kind": "attention", **sizes_of("attention", sizes), "window": self.window})] * (
                self.num_layers
            )
        chosen: list[Technique] = []
        for index in range(self.num_layers):
            entry = self.mixers[index % len(self.mixers)]
            options = {"kind": entry} if isinstance(entry, str) else entry
            kind = options["kind"]
            known = dict(sizes)
            if self.window is not None and kind != "attention":  # in a pattern that is the layer which sees everything
                known["window"] = self.window
            if MIXERS[kind].borrows and (lender := next((one for one in reversed(chosen) if one.lends), None)):
                known |= {name: getattr(lender, name) for name in ("head_dim", "rope", "window", "qk_norm")}
            chosen.append(MIXERS.read({**sizes_of(kind, known), **options}))
        return chosen


def sizes_of(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of `sizes` that mixer `kind` has fields for."""
    return {name: value for name, value in sizes.items() if name in MIXERS[kind].model_fields}


# What each family's transformers class assumes when config.json leaves a field out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
}
_HAS_WINDOW = {"mistral", "qwen2", "qwen3"}
_HAS_LAYER_TYPES = {"qwen2", "qwen3"}
_HAS_ATTENTION_BIAS = {"llama", "qwen3"}


def from_hf(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The `ModelConfig` that a parsed config.json describes.

    Raises SpecError naming the field when the architecture, activation, rotary scaling or another field that changes
    the result is not supported, or a needed field is missing.
    """
    if values.get("model_type") == OWN:
        return ModelConfig.read(values.get("config"))
    family = _family(values, where)
    read = {**_DEFAULTS[family], **{name: value for name, value in values.items() if value is not None}}
    if "sliding_window" in values and values["sliding_window"] is None:
        read["sliding_window"] = None
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(read.get(name), int) or read[name] < 1:
            raise SpecError(f"{where}: {name} is {read.get(name)!r}", fix=f"set {name} to a whole number above 0")
    for name, most in (("num_hidden_layers", 10_000), ("vocab_size", 2**31), ("hidden_size", 2**24)):
        if read[name] > most:
            raise SpecError(f"{where}: {name} is {read[name]}", fix=f"hone builds up to {most}; correct the file")
    _only(read, where, "hidden_act", ("silu", "swish"), "silu")
    _only(read, where, "partial_rotary_factor", (1, 1.0), 1.0)
    heads = read["num_attention_heads"]
    bias = bool(read.get("attention_bias", False)) and family in _HAS_ATTENTION_BIAS
    mixer = {
        "kind": "attention",
        "num_heads": heads,
        "num_kv_heads": read.get("num_key_value_heads", 8 if family == "mistral" else heads),
        "head_dim": read.get("head_dim") or read["hidden_size"] // heads,
        "rope": _rope(read, where),
        "qkv_bias": bias or family == "qwen2",
        "out_bias": bias,
        "qk_norm": family == "qwen3",
    }
    feed_forward = {
        "kind": "swiglu",
        "intermediate_size": read["intermediate_size"],
        "bias": bool(read.get("mlp_bias", False)) and family == "llama",
    }
    eos = read.get("eos_token_id")
    return ModelConfig.read(
        {
            "family": family,
            "vocab_size": read["vocab_size"],
            "hidden_size": read["hidden_size"],
            "layers": [
                {"mixer": {**mixer, "window": window}, "feed_forward": feed_forward}
                for window in _windows(read, family, where)
            ],
            "norm_eps": read["rms_norm_eps"],
            "tie_embeddings": bool(read.get("tie_word_embeddings", False)),
            "max_seq_len": read["max_position_embeddings"],
            "bos_token_id": read.get("bos_token_id"),
            "eos_token_ids": [] if eos is None else eos if isinstance(eos, list) else [eos],
        }
    )


def to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of `config` for transformers (version 4 and 5).

    Raises SpecError when the stack is one that no transformers class of its family can express.
    """
    config = config.model_copy(update={"layers": tuple(map(_as_attention, config.layers))})
    for index, layer in enumerate(config.layers):
        if layer.mixer.kind != "attention":
            raise SpecError(
                f"layer {index} mixes with '{layer.mixer.kind}', which no transformers class of family {config.family} has",
                fix="save it with hone.save, which has a format of its own for such stacks, or use attention alone",
            )
    first = config.layers[0]
    mixer, family = first.mixer, config.family
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first.feed_forward.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": mixer.rope.theta,
        "rope_scaling": _rope_scaling(mixer.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0]
        if len(config.eos_token_ids) == 1
        else list(config.eos_token_ids) or None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    if family in _HAS_ATTENTION_BIAS:
        values["attention_bias"] = mixer.out_bias
    if family == "llama":
        values["mlp_bias"] = first.feed_forward.bias
    if family in _HAS_WINDOW:
        windows = [layer.mixer.window for layer in config.layers]
        values["sliding_window"] = max((window for window in windows if window is not None), default=None)
        if family in _HAS_LAYER_TYPES:
            values["use_sliding_window"] = any(window is not None for window in windows)
            values["max_window_layers"] = config.num_layers
            values["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    _must_survive(config, values)
    return values


def own_format(config: ModelConfig, dtype: str, reason: str) -> dict[str, Any]:
    """The config.json of a stack that no transformers class can express: the `ModelConfig` as data, under hone's name."""
    return {
        "architectures": ["HoneDecoder"],
        "model_type": OWN,
        "note": f"Only hone reads this folder (hone.load), transformers cannot: {reason}.",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": dtype,
        "config": config.model_dump(mode="json"),
    }


def _as_attention(layer: LayerSpec) -> LayerSpec:
    """The layer with a sliding window written as the option of attention that it is."""
    if layer.mixer.kind != "sliding_window":
        return layer
    return layer.model_copy(update={"mixer": layer.mixer.as_attention()})


def _must_survive(config: ModelConfig, values: dict[str, Any]) -> None:
    """Raises SpecError unless reading `values` gives `config` again."""
    lost = difference(config.model_dump(mode="json"), from_hf(values).model_dump(mode="json"))
    if lost:
        raise SpecError(
            f"a {config.family} config.json cannot say this model: {lost}",
            fix="give every layer the same sizes; windows need family mistral, alternating ones qwen2 or qwen3",
        )


def _family(values: dict[str, Any], where: str) -> str:
    names = values.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    family = values.get("model_type")
    known = ", ".join(ARCHITECTURES.values())
    if names and names[0] not in ARCHITECTURES.values():
        raise SpecError(f"{where}: architectures is {names}, which hone cannot run", fix=f"supported are: {known}")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise SpecError(
            f"{where}: model_type is {family!r}, which hone cannot run",
            fix=f"supported are: {', '.join(ARCHITECTURES)}",
        )
    if names and names[0] != ARCHITECTURES[family]:
        raise SpecError(
            f"{where}: architectures is {names}, but model_type is {family!r}", fix=f"make them agree: {known}"
        )
    return family


def _only(values: dict[str, Any], where: str, name: str, supported: tuple, default: Any) -> None:
    if values.get(name, default) not in supported:
        raise SpecError(
            f"{where}: {name} is {values[name]!r}, which hone cannot run",
            fix=f"supported are: {', '.join(map(str, supported))}",
        )


def _rope(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Rotary fields from either form: rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(name) or {}, dict):
            raise SpecError(f"{where}: {name} is {values[name]!r}", fix=f"give {name} its fields, or remove it")
    scaling = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", values.get("rope_theta", 10000.0))
    if not isinstance(kind, str) or kind not in ("default", "linear", "llama3"):
        raise SpecError(
            f"{where}: rope_scaling is of type {kind!r}, which hone cannot run",
            fix="supported are: default, linear, llama3",
        )
    _only(scaling, f"{where}: rope_scaling", "partial_rotary_factor", (1, 1.0), 1.0)
    if kind == "default":
        return {"theta": theta}
    if "factor" not in scaling:
        raise SpecError(f"{where}: rope_scaling of type {kind!r} has no factor", fix="add rope_scaling.factor")
    if kind == "linear":
        return {"theta": theta, "scaling": "linear", "factor": scaling["factor"]}
    return {
        "theta": theta,
        "scaling": "llama3",
        "factor": scaling["factor"],
        "low_freq_factor": scaling.get("low_freq_factor", 1.0),
        "high_freq_factor": scaling.get("high_freq_factor", 4.0),
        "original_max_seq_len": scaling.get("original_max_position_embeddings", values["max_position_embeddings"]),
    }


def _rope_scaling(rope: Any) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_seq_len,
    }


def _windows(values: dict[str, Any], family: str, where: str) -> list[int | None]:
    """Each layer's sliding window, None for full attention."""
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    if family not in _HAS_WINDOW or window is None:
        return [None] * count
    if family not in _HAS_LAYER_TYPES:
        return [window] * count
    if not values.get("use_sliding_window", False):
        return [None] * count
    first = values.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise SpecError(f"{where}: max_window_layers is {first!r}", fix="set max_window_layers to a whole number")
    types = values.get("layer_types") or [
        "sliding_attention" if index >= first else "full_attention" for index in range(count)
    ]
    if not isinstance(types, list) or len(types) != count:
        raise SpecError(
            f"{where}: layer_types does not say what each of the {count} layers is", fix="give one entry a layer"
        )
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise SpecError(
                f"{where}: layer_types has {name!r}, which hone cannot run",
                fix="supported are: full_attention, sliding_attention",
            )
    return [window if name == "sliding_attention" else None for name in types]
