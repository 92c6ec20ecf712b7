"""The architectures of GGUF: names of tensors, hyperparameters, and the order of query and key rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.config import ModelConfig
from hone.model.rope import Rope

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The architecture in llama.cpp of each model_type."""

ENDS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SCALINGS = {"none": (), "linear": (), "yarn": (), "llama3": ("llama",)}
"""The rotary scalings that llama.cpp computes as hone does, and the architectures with them (empty: all)."""


def architecture(model_type: Any, where: str) -> str:
    """The architecture of a model_type. Raises SpecError for those that hone does not write as GGUF."""
    if model_type not in ARCHITECTURES:
        raise SpecError(
            f"{where}: models of type {model_type!r} cannot be exported as GGUF",
            fix=f"supported are: {', '.join(ARCHITECTURES)}; llama.cpp's convert_hf_to_gguf.py knows more",
        )
    return ARCHITECTURES[model_type]


def tensor_name(module: str) -> str:
    """'blk.3.attn_q' for 'model.layers.3.self_attn.q_proj'."""
    if module in ENDS:
        return ENDS[module]
    _, _, index, leaf = module.split(".", 3)
    return f"blk.{index}.{_LAYER[leaf]}"


def row_order(config: ModelConfig, module: str) -> Tensor | None:
    """The checkpoint row of each row of a matrix (or bias) in the file, int64; None where the order is the same.

    Checkpoints rotate channel i of a head with i + head_dim / 2. llama.cpp's llama architecture rotates neighbours, so
    the rows of queries and keys are interleaved; qwen's rotate as checkpoints do.
    """
    if ARCHITECTURES[config.family] != "llama" or not module.endswith((".q_proj", ".k_proj")):
        return None
    mixer: Any = config.layers[0].mixer
    heads = mixer.num_heads if module.endswith(".q_proj") else mixer.num_kv_heads
    return torch.arange(heads * mixer.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()


def hyperparameters(config: ModelConfig, where: str) -> tuple[dict[str, Any], list[str]]:
    """The architecture's metadata, and notes of what llama.cpp does otherwise.

    Raises SpecError for a model that llama.cpp would compute otherwise than hone.
    """
    arch = architecture(config.family, where)
    layer: Any = config.layers[0]
    mixer, rope = layer.mixer, layer.mixer.rope
    if layer.feed_forward.kind != "swiglu":
        raise SpecError(
            f"{where}: llama.cpp computes SiLU in models of type {config.family}, this one has {layer.feed_forward.kind}",
            fix="export a model with hidden_act silu",
        )
    if arch != "llama" and mixer.out_bias:
        raise SpecError(
            f"{where}: llama.cpp has no biases on the attention output of {config.family}",
            fix="export a model with attention_bias false",
        )
    notes = []
    context = config.max_seq_len
    windows = [one.mixer.window for one in config.layers if getattr(one.mixer, "window", None) is not None]
    if windows and min(windows) < context:
        context = min(windows)
        notes.append(
            f"context_length is {context}, the sliding window: llama.cpp has none for {arch} and would attend further back"
        )
    metadata = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": layer.feed_forward.intermediate_size,
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": mixer.head_dim,
        "rope.freq_base": float(rope.theta),
        "vocab_size": config.vocab_size,
        **_scaling(rope, arch, where),
    }
    return {f"{arch}.{name}": value for name, value in metadata.items()}, notes


def rope_factors(config: ModelConfig) -> Tensor | None:
    """rope_freqs.weight, float32 [head_dim / 2]: the divisor of each frequency, where the scaling has no formula in llama.cpp."""
    mixer: Any = config.layers[0].mixer
    if mixer.rope.scaling != "llama3":
        return None
    plain = mixer.rope.model_copy(update={"scaling": "none"})
    return plain.frequencies(mixer.head_dim) / mixer.rope.frequencies(mixer.head_dim)


def _scaling(rope: Rope, arch: str, where: str) -> dict[str, Any]:
    """The metadata of rotary scaling. Raises SpecError for one that llama.cpp computes otherwise."""
    only = _SCALINGS.get(rope.scaling)
    if only is None or (only and arch not in only):
        raise SpecError(
            f"{where}: llama.cpp does not compute the rotary scaling {rope.scaling!r} of {arch} models as hone does",
            fix="supported are: none, linear, yarn; llama3 for the architecture llama",
        )
    if rope.scaling in ("none", "llama3"):
        return {}
    found: dict[str, Any] = {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling == "yarn":
        usual = rope.model_copy(update={"scaling": "yarn", "attention_factor": _yarn_attention(rope.factor)})
        same = abs(rope.attention_factor - usual.attention_factor) < 1e-6 and rope.truncate
        if not same:
            raise SpecError(
                f"{where}: llama.cpp computes yarn with attention_factor {usual.attention_factor:g} and whole channels",
                fix="this checkpoint has others; export a model without them",
            )
        found |= {
            "rope.scaling.original_context_length": rope.original_max_seq_len,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return found


def _yarn_attention(factor: float) -> float:
    """YaRN's usual attention factor, which llama.cpp applies by itself. arXiv:2309.00071, equation 22."""
    return 0.1 * float(torch.tensor(factor).log()) + 1.0
