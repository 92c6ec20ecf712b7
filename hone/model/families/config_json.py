"""Translation between config.json with Hugging Face's fields and a `ModelConfig`."""

from __future__ import annotations

from typing import Any

from hone.base.errors import SpecError
from hone.base.identity import difference
from hone.model.config import LayerSpec, ModelConfig
from hone.model.families import FAMILIES
from hone.model.families.base import Family

OWN = "hone"
"""The model_type of folders in hone's own format."""


def from_hf(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The `ModelConfig` that a parsed config.json describes.

    Raises SpecError naming the field when the architecture, activation, rotary scaling or another field that changes
    the result is not supported, or a needed field is missing.
    """
    if values.get("model_type") == OWN:
        return ModelConfig.read(values.get("config"))
    model_type = _model_type(values, where)
    family = FAMILIES[model_type]
    read = {**family.defaults, **{name: value for name, value in values.items() if value is not None}}
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
    bias = bool(read.get("attention_bias", False)) and family.attention_bias
    mixer = {
        "kind": "attention",
        "num_heads": heads,
        "num_kv_heads": read.get("num_key_value_heads", heads),
        "head_dim": read.get("head_dim") or read["hidden_size"] // heads,
        "rope": _rope(read, where),
        "qkv_bias": bias or family.qkv_bias,
        "out_bias": bias,
        "qk_norm": family.qk_norm,
    }
    feed_forward = {
        "kind": "swiglu",
        "intermediate_size": read["intermediate_size"],
        "bias": bool(read.get("mlp_bias", False)) and family.mlp_bias,
    }
    eos = read.get("eos_token_id")
    return ModelConfig.read(
        {
            "family": model_type,
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
        if layer.feed_forward.kind != "swiglu":
            raise SpecError(
                f"layer {index} has feed-forward '{layer.feed_forward.kind}', which no transformers class of family "
                f"{config.family} has",
                fix="save it with hone.save, which has a format of its own for such stacks, or use swiglu",
            )
    first = config.layers[0]
    mixer, family = first.mixer, FAMILIES[config.family]
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
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
    if family.attention_bias:
        values["attention_bias"] = mixer.out_bias
    if family.mlp_bias:
        values["mlp_bias"] = first.feed_forward.bias
    if family.window != "none":
        windows = [layer.mixer.window for layer in config.layers]
        values["sliding_window"] = max((window for window in windows if window is not None), default=None)
        if family.window == "by_layer":
            values["use_sliding_window"] = any(window is not None for window in windows)
            values["max_window_layers"] = config.num_layers
            values["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    _must_survive(config, values)
    return values


def own_format(config: ModelConfig, dtype: str, reason: str) -> dict[str, Any]:
    """The config.json of a stack that no transformers class can express: the `ModelConfig` as data, with hone's model_type."""
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
        "config": {
            name: value for name, value in config.model_dump(mode="json").items() if name != "adapters" or value
        },
    }


def _as_attention(layer: LayerSpec) -> LayerSpec:
    """The layer, with mixer `sliding_window` replaced by `attention` with its option `window`."""
    if layer.mixer.kind != "sliding_window":
        return layer
    return layer.model_copy(update={"mixer": layer.mixer.as_attention()})


def _must_survive(config: ModelConfig, values: dict[str, Any]) -> None:
    """Raises SpecError unless reading `values` gives `config` again."""
    lost = difference(config.model_dump(mode="json"), from_hf(values).model_dump(mode="json"))
    if lost:
        raise SpecError(
            f"a {config.family} config.json cannot express this model: {lost}",
            fix="give every layer the same sizes; windows need family mistral, alternating ones qwen2 or qwen3",
        )


def _model_type(values: dict[str, Any], where: str) -> str:
    """The family's name. Raises SpecError unless model_type and architectures name one hone can run."""
    names = values.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    model_type = values.get("model_type")
    classes = [family.architecture for family in FAMILIES.values()]
    known = ", ".join(classes)
    if names and names[0] not in classes:
        raise SpecError(f"{where}: architectures is {names}, which hone cannot run", fix=f"supported are: {known}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise SpecError(
            f"{where}: model_type is {model_type!r}, which hone cannot run", fix=f"supported are: {', '.join(FAMILIES)}"
        )
    if names and names[0] != FAMILIES[model_type].architecture:
        raise SpecError(
            f"{where}: architectures is {names}, but model_type is {model_type!r}", fix=f"make them agree: {known}"
        )
    return model_type


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


def _windows(values: dict[str, Any], family: Family, where: str) -> list[int | None]:
    """Each layer's sliding window, None for full attention."""
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    if family.window == "none" or window is None:
        return [None] * count
    if family.window == "all":
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
            f"{where}: layer_types must have {count} entries, one for each layer", fix="give one entry a layer"
        )
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise SpecError(
                f"{where}: layer_types has {name!r}, which hone cannot run",
                fix="supported are: full_attention, sliding_attention",
            )
    return [window if name == "sliding_attention" else None for name in types]
