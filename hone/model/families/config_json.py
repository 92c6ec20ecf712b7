"""Translation between config.json with Hugging Face's fields and a `ModelConfig`."""

from __future__ import annotations

from typing import Any

from hone.base.errors import SpecError
from hone.base.identity import difference
from hone.model.config import LayerSpec, ModelConfig
from hone.model.families import FAMILIES
from hone.model.families.base import Family
from hone.model.families.rope_json import both_forms, positive, read_rope, write_rope_scaling

OWN = "hone"
"""The model_type of folders in hone's own format."""

_MIXER = "mixer."

ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
"""The gated feed-forward of each activation in config.json."""


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
    for name in ("sliding_window", "q_lora_rank", *family.numbers):  # null says that there is none
        if name in values and values[name] is None:
            read[name] = None
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(read.get(name), int) or read[name] < 1:
            raise SpecError(f"{where}: {name} is {read.get(name)!r}", fix=f"set {name} to a whole number above 0")
    for name, most in (("num_hidden_layers", 10_000), ("vocab_size", 2**31), ("hidden_size", 2**24)):
        if read[name] > most:
            raise SpecError(f"{where}: {name} is {read[name]}", fix=f"hone builds up to {most}; correct the file")
    activations = [name for name, kind in ACTIVATIONS.items() if family.experts is None or kind == "swiglu"]
    _only(read, where, family.activation, tuple(activations), "silu")
    for name, supported in family.only.items():
        _only(read, where, name, supported, supported[0])
    model: dict[str, Any] = dict(family.model)
    model |= {ours: read[name] for name, ours in family.numbers.items() if "." not in ours}
    if family.embedding_sqrt:
        model["embedding_multiplier"] = read["hidden_size"] ** 0.5
    feed_forward = {
        "kind": ACTIVATIONS[read.get(family.activation, "silu")],
        "intermediate_size": read["intermediate_size"],
        "bias": bool(read.get("mlp_bias", False)) and family.mlp_bias,
    }
    feed_forwards = [feed_forward] * read["num_hidden_layers"]
    if family.experts is not None:
        feed_forwards = family.experts.read(read, feed_forward, where)
    mixers, labels = _mixers(read, family, where), _labels(values, family, where)
    eos = read.get("eos_token_id")
    return ModelConfig.read(
        {
            "family": model_type,
            "vocab_size": read["vocab_size"],
            "hidden_size": read["hidden_size"],
            "layers": [
                {"mixer": mixer, "feed_forward": feed_forward, **family.layer}
                for mixer, feed_forward in zip(mixers, feed_forwards, strict=True)
            ],
            "norm_eps": read["rms_norm_eps"],
            "tie_embeddings": bool(read.get("tie_word_embeddings", False)) and not labels,
            "num_labels": labels,
            "max_seq_len": read["max_position_embeddings"],
            "bos_token_id": read.get("bos_token_id"),
            "eos_token_ids": [] if eos is None else eos if isinstance(eos, list) else [eos],
            **model,
        }
    )


def _mixers(read: dict[str, Any], family: Family, where: str) -> list[dict[str, Any]]:
    """Each layer's mixer."""
    if family.latent is not None:
        old, new = both_forms(read, where)
        mixer = family.latent.read(read, {**old, **new}, where)
        return [{**mixer, "rope": read_rope(read, family, where)}] * read["num_hidden_layers"]
    heads = read["num_attention_heads"]
    head_dim = read.get("head_dim") or max(1, read["hidden_size"] // heads)
    positive({"head_dim": head_dim}, "head_dim", where)
    bias = bool(read.get("attention_bias", False)) and family.attention_bias
    mixer = {
        "kind": "attention",
        "num_heads": heads,
        "num_kv_heads": read.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "qkv_bias": bias or family.qkv_bias,
        "out_bias": bias,
        "qk_norm": family.qk_norm,
        "rotary_dim": _rotary_dim(read, family, head_dim, where),
        **family.mixer,
    }
    if family.query_scalar:
        mixer["scale"] = positive(read, "query_pre_attn_scalar", where) ** -0.5
    mixer |= {ours.removeprefix(_MIXER): read[name] for name, ours in family.numbers.items() if ours.startswith(_MIXER)}
    if mixer.get("scale") == head_dim**-0.5:
        mixer["scale"] = None
    rotated = _rotated_layers(read, family, where)
    windows = _windows(read, family, rotated, where)
    ropes = {windowed: read_rope(read, family, where, windowed) for windowed in {one is not None for one in windows}}
    return [
        {**mixer, "rope": ropes[window is not None], "window": window, **({} if turned else {"rotary_dim": 0})}
        for window, turned in zip(windows, rotated, strict=True)
    ]


def to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of `config` for transformers (version 4 and 5).

    Raises SpecError when the stack is one that no transformers class of its family can express.
    """
    family = FAMILIES[config.family]
    config = config.model_copy(update={"layers": tuple(_as_attention(one, config) for one in config.layers)})
    _must_be_known(config, family)
    first = config.layers[0]
    mixer = first.mixer
    windows = [getattr(layer.mixer, "window", None) for layer in config.layers]
    whole = next((one.mixer for one, window in zip(config.layers, windows) if window is None), mixer)
    local = next((one.mixer for one, window in zip(config.layers, windows) if window is not None), None)
    rope = whole.rope if family.local_theta else mixer.rope
    dense = next((layer.feed_forward for layer in config.layers if layer.feed_forward.kind != "moe"), None)
    activation = next(name for name, kind in ACTIVATIONS.items() if dense is None or kind == dense.kind)
    values: dict[str, Any] = {
        "architectures": [family.classifier if config.num_labels else family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": (dense or first.feed_forward).intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        family.activation: activation,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": write_rope_scaling(rope) or family.unscaled,
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
    if config.num_labels:
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    if family.latent is None:
        values |= {"num_key_value_heads": mixer.num_kv_heads, "head_dim": mixer.head_dim}
    else:
        values |= family.latent.write(mixer)
        values["rope_scaling"] = family.latent.scaling(mixer, values["rope_scaling"])
    if family.defaults.get("pad_token_id", 0) >= config.vocab_size:
        values["pad_token_id"] = None  # its class's default would be outside the vocabulary
    if family.attention_bias:
        values["attention_bias"] = mixer.out_bias
    if family.mlp_bias:
        values["mlp_bias"] = first.feed_forward.bias
    if family.experts is not None:
        values |= family.experts.write(config)
    for name, ours in family.numbers.items():
        into, _, field = ours.rpartition(".")
        values[name] = getattr(mixer if into else config, field)
        if ours == "mixer.scale" and values[name] is None:
            values[name] = mixer.head_dim**-0.5
    if family.query_scalar:
        values["query_pre_attn_scalar"] = mixer.head_dim if mixer.scale is None else round(mixer.scale**-2)
    if family.local_theta:
        values[family.local_theta] = family.defaults[family.local_theta] if local is None else local.rope.theta
        values["rope_theta"] = family.defaults["rope_theta"] if whole.window is not None else whole.rope.theta
    if family.partial_rotary and mixer.rotary_dim is not None:
        values["partial_rotary_factor"] = mixer.rotary_dim / mixer.head_dim
    if "original_max_position_embeddings" in family.defaults and rope.scaling != "none":
        values["original_max_position_embeddings"] = rope.original_max_seq_len
    if family.nope_layers:
        values["no_rope_layers"] = [int(layer.mixer.rotary_dim != 0) for layer in config.layers]
    if family.window != "none":
        values["sliding_window"] = max((window for window in windows if window is not None), default=None)
        if family.window == "by_layer":
            values["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
            if family.window_switch:
                values["use_sliding_window"] = any(window is not None for window in windows)
                if not family.nope_layers:
                    values["max_window_layers"] = config.num_layers
            elif local is None:  # transformers makes the mask of local layers whether or not there is one
                values["sliding_window"] = family.defaults["sliding_window"]
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
            name: value
            for name, value in config.model_dump(mode="json").items()
            if value or name not in ("adapters", "num_labels")
        },
    }


def _as_attention(layer: LayerSpec, config: ModelConfig) -> LayerSpec:
    """The layer, with mixer `sliding_window` replaced by `attention` with its option `window`, and what `mla`'s empty fields mean."""
    latent = FAMILIES[config.family].latent
    if latent is not None and layer.mixer.kind == "mla":
        return layer.model_copy(update={"mixer": latent.full(layer.mixer, config.norm_eps)})
    if layer.mixer.kind != "sliding_window":
        return layer
    return layer.model_copy(update={"mixer": layer.mixer.as_attention()})


def _must_be_known(config: ModelConfig, family: Family) -> None:
    """Raises SpecError for a mixer or feed-forward that no layer of the family has."""
    usual = "attention" if family.latent is None else "mla"
    known = ("swiglu", "moe") if family.experts else tuple(ACTIVATIONS.values())
    for index, layer in enumerate(config.layers):
        if layer.mixer.kind != usual:
            raise SpecError(
                f"layer {index} mixes with '{layer.mixer.kind}', which no transformers class of family {config.family} has",
                fix=f"save it with hone.save, which has a format of its own for such stacks, or use {usual} alone",
            )
        if layer.feed_forward.kind not in known:
            raise SpecError(
                f"layer {index} has feed-forward '{layer.feed_forward.kind}', which no transformers class of family "
                f"{config.family} has",
                fix="save it with hone.save, which has a format of its own for such stacks, or use swiglu",
            )


def _must_survive(config: ModelConfig, values: dict[str, Any]) -> None:
    """Raises SpecError unless reading `values` gives `config` again."""
    lost = difference(config.model_dump(mode="json"), from_hf(values).model_dump(mode="json"))
    if lost:
        raise SpecError(
            f"a {config.family} config.json cannot express this model: {lost}",
            fix="give every layer the same sizes; windows need family mistral, alternating ones qwen2 or qwen3",
        )


def _labels(values: dict[str, Any], family: Family, where: str) -> int:
    """The outputs of the head of a class for sequences, 0 of one for tokens. Raises SpecError for more than one."""
    names = values.get("architectures") or []
    if (names if isinstance(names, str) else [*names, ""][0]) != family.classifier:
        return 0
    labels = values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
    if count != 1:
        raise SpecError(
            f"{where}: a classifier with {count} labels, and hone runs reward models, which have one",
            fix="give a model with num_labels 1",
        )
    return 1


def _model_type(values: dict[str, Any], where: str) -> str:
    """The family's name. Raises SpecError unless model_type and architectures name one hone can run."""
    names = values.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    model_type = values.get("model_type")
    if isinstance(values.get("text_config"), dict) and model_type not in FAMILIES:
        raise SpecError(
            f"{where}: model_type is {model_type!r}, a model of text and other inputs, which hone cannot run",
            fix="save its language model alone: architectures Gemma3ForCausalLM, model_type gemma3_text, the fields of "
            "text_config, and tensors named model.*",
        )
    classes = [family.architecture for family in FAMILIES.values()]
    known = ", ".join(classes)
    if names and names[0] not in [*classes, *(family.classifier for family in FAMILIES.values())]:
        raise SpecError(f"{where}: architectures is {names}, which hone cannot run", fix=f"supported are: {known}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise SpecError(
            f"{where}: model_type is {model_type!r}, which hone cannot run", fix=f"supported are: {', '.join(FAMILIES)}"
        )
    if names and names[0] not in (FAMILIES[model_type].architecture, FAMILIES[model_type].classifier):
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


def _rotary_dim(values: dict[str, Any], family: Family, head_dim: int, where: str) -> int | None:
    """Channels of a head that are rotated; None for all."""
    old, new = both_forms(values, where)
    scaling = {**old, **new}
    if not family.partial_rotary:
        _only(values, where, "partial_rotary_factor", (1, 1.0), 1.0)
        _only(scaling, f"{where}: rope_scaling", "partial_rotary_factor", (1, 1.0), 1.0)
        return None
    part = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if not isinstance(part, (int, float)) or not 0 < part <= 1:
        raise SpecError(f"{where}: partial_rotary_factor is {part!r}", fix="set it to a number above 0, up to 1")
    count = int(head_dim * part)
    return None if count == head_dim else count


def _rotated_layers(values: dict[str, Any], family: Family, where: str) -> list[bool]:
    """Whether each layer has rotary positions."""
    count = values["num_hidden_layers"]
    if not family.nope_layers:
        return [True] * count
    listed = values.get("no_rope_layers")
    if listed is None:
        every = positive(values, "no_rope_layer_interval", where)
        return [bool((index + 1) % every) for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count:
        raise SpecError(
            f"{where}: no_rope_layers is {listed!r}", fix=f"give it {count} entries: 1 for rotary positions, 0 for none"
        )
    return [bool(one) for one in listed[:count]]


def _windows(values: dict[str, Any], family: Family, rotated: list[bool], where: str) -> list[int | None]:
    """Each layer's sliding window, None for full attention."""
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    if family.window == "none" or window is None:
        return [None] * count
    if family.window == "all":
        return [window] * count
    if family.window_switch and not values.get("use_sliding_window", False):
        return [None] * count
    types = values.get("layer_types") or _layer_types(values, family, rotated, where)
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


def _layer_types(values: dict[str, Any], family: Family, rotated: list[bool], where: str) -> list[str]:
    """What transformers takes for layer_types where config.json has none."""
    if family.nope_layers:
        local = [not one for one in rotated]
    elif family.window_pattern is not None:
        every = positive(values, "sliding_window_pattern", where, family.window_pattern)
        local = [bool((index + 1) % every) for index in range(len(rotated))]
    else:
        first = values.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise SpecError(f"{where}: max_window_layers is {first!r}", fix="set max_window_layers to a whole number")
        local = [index >= first for index in range(len(rotated))]
    return ["sliding_attention" if one else "full_attention" for one in local]
