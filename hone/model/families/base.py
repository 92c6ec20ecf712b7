"""A family of checkpoints: the defaults of its class in transformers, and its tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hone.model.families.deepseek_json import Latent, RoutedExperts
from hone.model.families.experts_json import Experts
from hone.model.linear_spec import LinearSpec

NAMES: Mapping[str, str] = {
    "mixer.q": "self_attn.q_proj",
    "mixer.k": "self_attn.k_proj",
    "mixer.v": "self_attn.v_proj",
    "mixer.out": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "mixer.q_norm": "self_attn.q_norm",
    "mixer.k_norm": "self_attn.k_norm",
    "mixer.sinks": "self_attn.sinks",
}
"""hone's names of a layer's modules (pieces of linears: 'mixer.q', norms: 'mixer_norm') and parameters, and Llama's."""

_BLOCKS = {"mixer": "self_attn", "feed_forward": "mlp"}
"""The checkpoint module below which pieces without a name in the family are stored."""


@dataclass(frozen=True)
class Family:
    """One row: how a checkpoint of this family is read and written."""

    architecture: str
    """Name of its class in transformers."""
    defaults: Mapping[str, Any]
    """That class's defaults for fields that config.json leaves out."""
    qkv_bias: bool = False
    """Whether queries, keys and values always have biases."""
    attention_bias: bool = False
    """Whether config.json's attention_bias gives all four projections biases."""
    mlp_bias: bool = False
    """Whether config.json's mlp_bias gives the feed-forward biases."""
    qk_norm: bool = False
    """Whether an RMS norm is applied to each query and key head."""
    window: Literal["none", "all", "by_layer"] = "none"
    """Which layers config.json's sliding_window holds for; by_layer: as layer_types says."""
    window_switch: bool = False
    """Whether windows hold only where config.json's use_sliding_window is true."""
    window_pattern: int | None = None
    """Without layer_types: every layer but each n-th one has a window (config.json's sliding_window_pattern overrides n)."""
    activation: str = "hidden_act"
    """The field of config.json that names the activation."""
    mixer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every layer's `Attention` that all its checkpoints share."""
    layer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every `LayerSpec` that all its checkpoints share."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` that all its checkpoints share."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that are fields of ours by another name: of `ModelConfig` ('logits_softcap') or of every
    layer's `Attention` ('mixer.softcap'). null is a value: no softcap."""
    embedding_sqrt: bool = False
    """Whether embeddings are multiplied by the square root of hidden_size."""
    query_scalar: bool = False
    """Whether the scale of attention is config.json's query_pre_attn_scalar ** -0.5."""
    local_theta: str = ""
    """The field of config.json with the rotary base of layers with a window, which know no scaling; empty: all are alike."""
    partial_rotary: bool = False
    """Whether config.json's partial_rotary_factor says which part of a head is rotated."""
    nope_layers: bool = False
    """Whether config.json's no_rope_layers says which layers have rotary positions (1) and which none (0)."""
    rope_scalings: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
    """Scalings of rotary positions that its class in transformers knows."""
    latent: Latent | None = None
    """How config.json describes latent attention, which all its layers have; None: they have attention of heads."""
    experts: Experts | RoutedExperts | None = None
    """How config.json describes its experts; None: its feed-forwards are dense."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of config.json that hone runs with these values alone, null among them."""
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where its checkpoints store all experts of a layer as one tensor: its name, and the modules of one expert whose rows alternate
    in it (hone.model.weights.stacked)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Its names where they differ from `NAMES`. The path of a fused linear ('mixer.qkv') maps to the module that stores it whole,
    that of a parameter which is no norm ('feed_forward.router_bias') to its tensor."""

    @property
    def classifier(self) -> str:
        """Name of its class there that scores sequences."""
        name = self.architecture.replace("Gemma3For", "Gemma3TextFor")
        return name.replace("ForCausalLM", "ForSequenceClassification")

    @property
    def unscaled(self) -> dict[str, Any] | None:
        """rope_scaling of rotary positions without one, where its class's default is a scaling."""
        return {"rope_type": "default"} if "rope_scaling" in self.defaults else None

    def modules(self, layer: int, path: str, linear: LinearSpec) -> dict[str, int]:
        """The checkpoint modules of the linear at `path` below layer `layer`, in order of its rows, with their counts.

        Experts follow one another: 'model.layers.0.mlp.experts.3.gate_proj'.
        """
        prefix, (block, _, name) = f"model.layers.{layer}", path.partition(".")
        if path in self.names and name not in linear.parts and linear.experts is None:
            return {f"{prefix}.{self.names[path]}": linear.out_features}
        found = {}
        for part, rows in linear.parts.items():
            expert, _, piece = part.rpartition(".")
            where, _, leaf = self._name(f"{block}.{piece}", f"{_BLOCKS[block]}.{piece}").rpartition(".")
            found[".".join(filter(None, (prefix, where, expert, leaf)))] = rows
        return found

    def tensor(self, layer: int, path: str) -> str:
        """The checkpoint name of the norm weight or other parameter at `path` below layer `layer`."""
        owner, _, leaf = path.rpartition(".")
        name = self._name(owner, "") if leaf == "weight" else ""
        return f"model.layers.{layer}.{name}.{leaf}" if name else f"model.layers.{layer}.{self._name(path, path)}"

    def _name(self, path: str, otherwise: str) -> str:
        return self.names.get(path) or NAMES.get(path, otherwise)
