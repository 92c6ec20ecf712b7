"""A family of checkpoints: the defaults of its class in transformers, and its tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
}
"""hone's names of a layer's modules (pieces of linears: 'mixer.q', norms: 'mixer_norm') and Llama's."""

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
    names: Mapping[str, str] = field(default_factory=dict)
    """Its names where they differ from `NAMES`. The path of a fused linear ('mixer.qkv') maps to the module that stores it whole."""

    def modules(self, layer: int, path: str, linear: LinearSpec) -> dict[str, int]:
        """The checkpoint modules of the linear at `path` below layer `layer`, in order of its rows, with their counts.

        Experts follow one another: 'model.layers.0.mlp.experts.3.gate_proj'.
        """
        prefix, (block, _, name) = f"model.layers.{layer}", path.partition(".")
        if path in self.names and name not in linear.parts:
            return {f"{prefix}.{self.names[path]}": linear.out_features}
        found = {}
        for part, rows in linear.parts.items():
            expert, _, piece = part.rpartition(".")
            where, _, leaf = self._name(f"{block}.{piece}", f"{_BLOCKS[block]}.{piece}").rpartition(".")
            found[".".join(filter(None, (prefix, where, expert, leaf)))] = rows
        return found

    def tensor(self, layer: int, path: str) -> str:
        """The checkpoint name of the norm weight or other parameter at `path` below layer `layer`."""
        owner, dot, leaf = path.rpartition(".")
        name = self._name(owner, "") if leaf == "weight" else ""
        return f"model.layers.{layer}.{name}{dot}{leaf}" if name else f"model.layers.{layer}.{path}"

    def _name(self, path: str, otherwise: str) -> str:
        return self.names.get(path) or NAMES.get(path, otherwise)
