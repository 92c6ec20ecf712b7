"""Families of checkpoints that hone reads and writes: a row each. `config_json` translates their config.json."""

from __future__ import annotations

from hone.model.families.base import Family

_POST_NORMS = {
    "mixer_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}
_GEMMA = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_CAUSAL = {"use_bidirectional_attention": (False, None)}

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
        window_switch=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
        attention_bias=True,
        qk_norm=True,
        window="by_layer",
        window_switch=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32000,
        },
        window="all",
        partial_rotary=True,
        rope_scalings=("default", "longrope"),
        names={"mixer.qkv": "self_attn.qkv_proj", "feed_forward.gate_up": "mlp.gate_up_proj"},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        attention_bias=True,
        mlp_bias=True,
        numbers={
            "embedding_multiplier": "embedding_multiplier",
            "residual_multiplier": "residual_multiplier",
            "attention_multiplier": "mixer.scale",
            "logits_scaling": "logits_scaling",
        },
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        attention_bias=True,
        qk_norm=True,
        mixer={"qk_norm_over": "projection"},
        layer={"norms": "post"},
        names={
            "mixer_post_norm": "post_attention_layernorm",
            "feed_forward_post_norm": "post_feedforward_layernorm",
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        attention_bias=True,
        window="by_layer",
        window_pattern=2,
        activation="hidden_activation",
        layer={"norms": "both"},
        model={"norm_offset": 1.0},
        numbers={"final_logit_softcapping": "logits_softcap", "attn_logit_softcapping": "mixer.softcap"},
        embedding_sqrt=True,
        query_scalar=True,
        only=_CAUSAL,
        names=_POST_NORMS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": None,
        },
        attention_bias=True,
        qk_norm=True,
        window="by_layer",
        window_pattern=6,
        activation="hidden_activation",
        layer={"norms": "both"},
        model={"norm_offset": 1.0},
        numbers={"final_logit_softcapping": "logits_softcap"},
        embedding_sqrt=True,
        query_scalar=True,
        local_theta="rope_local_base_freq",
        only={**_CAUSAL, "attn_logit_softcapping": (None,)},
        names=_POST_NORMS,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "pad_token_id": 128004,
            "tie_word_embeddings": True,
        },
        attention_bias=True,
        mlp_bias=True,
        window="by_layer",
        window_switch=True,
        nope_layers=True,
    ),
}
"""The family of each model_type in config.json."""
