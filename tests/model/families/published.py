"""config.json files as published (the form of transformers 4), with small sizes and short contexts in the place of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "hidden_act": "silu", "max_position_embeddings": 64, "max_window_layers": 28, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 64,
    "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 9,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 64, "query_pre_attn_scalar": 32,
    "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 9, "sliding_window_pattern": 3,
}  # fmt: skip
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "hidden_act": "silu",
    "max_position_embeddings": 64, "original_max_position_embeddings": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 23,
    "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.05 * place for place in range(pairs)],
        "long_factor": [1.1 + 0.7 * place for place in range(pairs)],
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5": {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2.5-yarn": {
        **QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_scaling": YARN, "max_position_embeddings": 128,
    },
    "qwen3-yarn": {
        **QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 32,
        "rope_scaling": {**YARN, "rope_type": "yarn", "beta_fast": 16, "beta_slow": 2, "truncate": False},
        "max_position_embeddings": 128,
    },
    "llama-dynamic": {**LLAMA, "max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama-yarn-mscale": {
        **LLAMA, "max_position_embeddings": 128,
        "rope_scaling": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
    },
    "llama-yarn-attention-factor": {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.3}},
    "llama-linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma2": GEMMA2,
    "gemma2-27b": {**GEMMA2, "query_pre_attn_scalar": 18, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0},
    "gemma3-1b": GEMMA3,
    "gemma3-4b-text": {**GEMMA3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "query_pre_attn_scalar": 27},
    "phi3-mini-4k": PHI3,
    "phi3-mini-128k": {
        **PHI3, "sliding_window": 262144, "max_position_embeddings": 256, "original_max_position_embeddings": 32,
        "rope_scaling": longrope(8),
    },
    "phi4-mini": {
        **PHI3, "partial_rotary_factor": 0.75, "sliding_window": 262144, "max_position_embeddings": 256,
        "original_max_position_embeddings": 32, "rope_scaling": longrope(6), "tie_word_embeddings": True,
    },
    "granite3": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
        "attention_multiplier": 0.15625, "embedding_multiplier": 12.0, "hidden_act": "silu", "logits_scaling": 8.0,
        "max_position_embeddings": 64, "mlp_bias": False, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu",
        "layer_types": ["full_attention"] * 4, "max_position_embeddings": 64, "max_window_layers": 28,
        "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "smollm3-yarn-windows": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "max_position_embeddings": 128,
        "no_rope_layer_interval": 2, "rope_scaling": YARN, "sliding_window": 9, "use_sliding_window": True,
    },
}  # fmt: skip
"""By a name for the test: what was published, sizes aside."""


def make_folder(folder: Path, values: dict[str, Any], std: float) -> Path:
    """Writes config.json and random weights (normal, matrices with `std`) as transformers names them."""
    (folder / "config.json").write_text(json.dumps(values), encoding="utf8")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(*((0.5, 0.2) if parameter.dim() == 1 else (0.0, std)))
    tied = config.tie_word_embeddings
    tensors = {key: value for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return folder
