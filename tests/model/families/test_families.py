"""Every family's logits against transformers, both ways: its folder in ours, ours in its; and the fields we refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.decoder import build
from hone.model.families.config_json import from_hf, to_hf
from hone.model.shape import Shape

SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ALTERNATING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-untied-biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3.1": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-wide-heads": (transformers.LlamaConfig, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 11, "head_dim": 8}),
    "mistral-full": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 8}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-windows": (transformers.Qwen2Config, ALTERNATING),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-windows": (transformers.Qwen3Config, {"head_dim": 16, **ALTERNATING}),
}


def theirs(name: str) -> transformers.PreTrainedModel:
    """A random transformers model whose every parameter, norms and biases too, matters."""
    make, more = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**SIZES, **more})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_both_ways(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    ours = hf.load(tmp_path / "theirs")
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 41))
    expected = model(tokens).logits
    torch.testing.assert_close(ours(tokens), expected, atol=2e-5, rtol=1e-5)
    hf.save(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    torch.testing.assert_close(again(tokens).logits, expected, atol=1e-6, rtol=1e-6)
    assert sum(parameter.numel() for parameter in ours.parameters()) == ours.config.num_params == model.num_parameters()


@pytest.mark.parametrize("name", MODELS)
def test_config_survives_its_own_print(name: str) -> None:
    make, more = MODELS[name]
    config = from_hf({**make(**{**SIZES, **more}).to_dict(), "architectures": None})
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config
    assert type(config).read(config.model_dump(mode="json")) == config


def test_old_rope_scaling_form_is_read() -> None:
    values = {**SIZES, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    rope = from_hf(values).layers[0].mixer.rope
    assert (rope.scaling, rope.theta, rope.factor, rope.original_max_seq_len) == ("llama3", 5e5, 8.0, 64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "axial"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "short_factor"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"model_type": "gemma3", "text_config": {}, "architectures": ["Gemma3ForConditionalGeneration"]}, "gemma3"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 4}, "num_kv_heads"),
        ({"eos_token_id": 4000}, "4000"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(SpecError, match=named) as error:
        from_hf({**SIZES, "model_type": "llama", **change})
    assert error.value.fix


def test_a_stack_that_no_family_can_say_is_refused_at_save() -> None:
    config = Shape(family="llama", num_layers=2).config(64)
    one = config.layers[0]
    windowed = one.model_copy(update={"mixer": one.mixer.model_copy(update={"window": 16})})
    with pytest.raises(SpecError, match="window"):
        to_hf(config.model_copy(update={"layers": (one, windowed)}))


def test_shape_refuses_what_its_family_has_not_before_anything_is_trained() -> None:
    with pytest.raises(SpecError, match="num_heads"):
        Shape(hidden_size=100, num_heads=6).config(64)
    with pytest.raises(SpecError, match="window"):
        Shape(family="llama", window=8).config(64)
    with pytest.raises(SpecError, match="num_kv_heads"):
        Shape(num_heads=6, num_kv_heads=4).config(64)
    with pytest.raises(SpecError, match="99"):
        Shape().config(64, eos=99)
    assert Shape(family="mistral", window=8).config(64, eos=(3, 4)).eos_token_ids == (3, 4)
    assert Shape.read({"family": "qwen3", "head_dim": 64}).config(64).layers[0].mixer.qk_norm


def test_predictions() -> None:
    config = Shape(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96).config(100)
    assert config.num_params == sum(parameter.numel() for parameter in build(config).parameters())
    assert config.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 2
    per_layer = (64 + 64) * 64 + 64 * 64 + 3 * 64 * 96
    assert config.flops_per_token(1) == 2 * (2 * per_layer + 100 * 64) + 2 * 4 * 4 * 16
    assert config.dims().num_layers == 2


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_absurd_sizes_are_refused_before_anything_is_built(name):
    values = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    values |= {"num_hidden_layers": 1, "num_attention_heads": 4, name: 10**9 if "layers" in name else 2**60}
    with pytest.raises(SpecError, match=name):
        from_hf(values)


def test_a_pattern_longer_than_the_stack_is_refused():
    """The last mixers would be left out without a word."""
    with pytest.raises(SpecError, match="mixers names 3 layers, num_layers is 2"):
        Shape(num_layers=2, mixers=("attention", "retnet", "mla")).config(64)


def test_layers_that_cannot_be_are_refused_when_the_shape_is_read():
    """Not when the stage runs, hours later."""
    with pytest.raises(SpecError, match="no dilation is 1"):
        Shape.read({"mixers": [{"kind": "longnet", "segments": [8], "dilations": [2]}]})
    with pytest.raises(SpecError, match=r"layer 0 .'shared_kv'. has no layer before it"):
        Shape.read({"mixers": ["shared_kv"]})
