"""GGUF's names of tensors, the order of query and key rows, and the tensors that a checkpoint has as numbers in config.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.exports.gguf.architectures import ARCHITECTURES
from hone.model.config import ModelConfig

ENDS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # gate first, then up: as llama.cpp splits it
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "mixer_norm": "attn_norm",
    "mixer_post_norm": "post_attention_norm",
    "mixer.q_norm": "attn_q_norm",
    "mixer.k_norm": "attn_k_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_post_norm": "post_ffw_norm",
}
"""By hone's path: checkpoints call what stands before and after a block by the same names."""


def tensor_name(module: str) -> str:
    """'blk.3.attn_q' for the linear 'model.layers.3.self_attn.q_proj'."""
    if module in ENDS:
        return ENDS[module]
    _, _, index, leaf = module.split(".", 3)
    return f"blk.{index}.{_LINEARS[leaf]}"


def norm_name(module: str, path: str) -> str:
    """'blk.3.attn_norm' for the norm 'model.layers.3.input_layernorm', which is 'mixer_norm' below hone's layer."""
    return ENDS[module] if module in ENDS else f"blk.{module.split('.')[2]}.{_NORMS[path]}"


def row_order(config: ModelConfig, module: str) -> Tensor | None:
    """The checkpoint row of each row of a matrix (or bias) in the file, int64; None where the order is the same.

    Checkpoints rotate channel i of a head with i + head_dim / 2. Some architectures of llama.cpp rotate neighbours, so
    the rows of queries and keys are interleaved; the others rotate as checkpoints do.
    """
    if not ARCHITECTURES[config.family].neighbours or not module.endswith((".q_proj", ".k_proj")):
        return None
    mixer: Any = config.layers[0].mixer
    heads = mixer.num_heads if module.endswith(".q_proj") else mixer.num_kv_heads
    return torch.arange(heads * mixer.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()


def rope_factors(config: ModelConfig) -> dict[str, Tensor]:
    """The divisors of each frequency, float32 [rotated channels / 2], where the scaling has no formula in llama.cpp."""
    mixer: Any = config.layers[0].mixer
    rope, dim = mixer.rope, mixer.rotary_dim or mixer.head_dim
    if rope.scaling == "longrope":
        return {
            "rope_factors_long.weight": torch.tensor(rope.long_factor),
            "rope_factors_short.weight": torch.tensor(rope.short_factor),
        }
    if rope.scaling == "llama3":
        plain = rope.model_copy(update={"scaling": "none"})
        return {"rope_freqs.weight": plain.frequencies(dim) / rope.frequencies(dim)}
    return {}
