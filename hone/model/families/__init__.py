"""Families of checkpoints that hone reads and writes: a row each. `config_json` translates their config.json."""

from __future__ import annotations

from hone.model.families.base import Family

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
        qkv_bias=True,
        window="by_layer",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
        attention_bias=True,
        qk_norm=True,
        window="by_layer",
    ),
}
"""The family of each model_type in config.json."""
