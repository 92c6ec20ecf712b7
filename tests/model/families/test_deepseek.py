"""DeepSeek-V2 and V3 with random weights against transformers: logits, saved folders both ways, decoding, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.families.config_json import from_hf, to_hf
from hone.model.families.experts_json import TRAINING
from hone.model.incremental import generate
from hone.model.shape import Shape
from hone.ops import dispatch
from tests.model.families.published import SMALL

SIZES = {
    **{name: SMALL[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "moe_intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16, "type": "yarn",
}  # fmt: skip
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False, "aux_loss_alpha": 0.001,
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "ep_size": 1, "first_k_dense_replace": 1,
    "hidden_act": "silu", "moe_layer_freq": 1, "n_group": 1, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_experts_per_tok": 3, "pretraining_tp": 1, "q_lora_rank": None, "rms_norm_eps": 1e-6, "rope_scaling": YARN,
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
V2 = {
    **V2_LITE, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0, "n_shared_experts": 1,
}  # fmt: skip
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.001,
    "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 1,
    "hidden_act": "silu", "moe_layer_freq": 1, "n_group": 4, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 3, "num_nextn_predict_layers": 1, "q_lora_rank": 24, "rms_norm_eps": 1e-6,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 2, "topk_method": "noaux_tc",
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "v2-lite": V2_LITE,
    "v2-groups": V2,
    "v2-plain-rope": {**V2, "rope_scaling": None, "rms_norm_eps": 1e-4},
    "v2-warmer-keys": {**V2_LITE, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "v3": V3,
    "v3-one-group-halves": {
        **V3, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False, "q_lora_rank": None,
    },
    "v3-all-experts": {**V3, "first_k_dense_replace": 0, "rope_scaling": {"type": "yarn", "factor": 4.0,
                       "original_max_position_embeddings": 16}},
}  # fmt: skip


def folder_of(where: Path, values: dict[str, Any]) -> transformers.PreTrainedModel:
    """Writes a folder with random weights as transformers does, and returns its model."""
    where.mkdir()
    (where / "config.json").write_text(json.dumps({**values, **SIZES}), encoding="utf8")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(where)).float()
    with torch.no_grad():
        for name, one in model.state_dict().items():
            one.normal_(*((0.5, 0.2) if one.dim() == 1 and "bias" not in name else (0.0, 0.12)))
    model.save_pretrained(where)
    return theirs(where)


def theirs(folder: Path) -> transformers.PreTrainedModel:
    kept = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **kept).eval()


def some_tokens(length: int = 57) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_equal_transformers_both_ways(name: str, tmp_path: Path) -> None:
    values, folder, saved = {**PUBLISHED[name], **SIZES}, tmp_path / "theirs", tmp_path / "ours"
    model, ours, tokens = folder_of(folder, PUBLISHED[name]), hf.load(folder), some_tokens()
    assert ours.config == from_hf(values), "as published, and as transformers 5 writes it again"
    buffers = sum(one.numel() for key, one in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert ours.config.num_params == model.num_parameters() + buffers == sum(one.numel() for one in ours.parameters())
    expected = model(tokens).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)
    hf.save(ours, saved)
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    torch.testing.assert_close(theirs(saved)(tokens).logits, expected, atol=1e-6, rtol=1e-6)
    assert hf.load(saved).config == ours.config


@torch.no_grad()
@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_decoding_from_latents_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    model, tokens = folder_of(tmp_path / "theirs", PUBLISHED[name]), some_tokens(9)
    ours = hf.load(tmp_path / "theirs")
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(ours, tokens, 8), expected)
    assert ours.config.kv_bytes_per_token(2) == 3 * (32 + 8) * 2


@torch.no_grad()
def test_layers_that_predict_further_tokens_are_left_out_with_one_note(tmp_path: Path) -> None:
    folder_of(tmp_path / "theirs", V3)
    file = tmp_path / "theirs" / "model.safetensors"
    stored = load_file(file)
    last, extra = f"model.layers.{SIZES['num_hidden_layers'] - 1}.", f"model.layers.{SIZES['num_hidden_layers']}."
    wide = SIZES["hidden_size"]
    further = {extra + key.removeprefix(last): one.clone() for key, one in stored.items() if key.startswith(last)}
    further |= {f"{extra}eh_proj.weight": torch.zeros(wide, 2 * wide), f"{extra}enorm.weight": torch.ones(wide)}
    save_file({**stored, **further}, file)
    dispatch._say.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"model\.layers\.3 predict further tokens") as said:
        made = hf.load(tmp_path / "theirs")
        again = hf.load(tmp_path / "theirs")
    assert len([one for one in said if "further" in str(one.message)]) == 1
    assert torch.equal(made(some_tokens()), again(some_tokens())) and made.config.num_layers == 3
    assert hf.Checkpoint(tmp_path / "theirs").values["num_nextn_predict_layers"] == 0, "what a compressed folder says"
    hf.save(made, tmp_path / "ours")
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == stored.keys()
    values = json.loads((tmp_path / "ours" / "config.json").read_text(encoding="utf8"))
    assert values["num_nextn_predict_layers"] == 0


@torch.no_grad()
def test_the_bias_of_a_choice_stays_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    folder_of(tmp_path / "theirs", V3)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    made = hf.load(tmp_path / "theirs", dtype=torch.bfloat16)
    assert made.layers[1].feed_forward.router.weight.dtype == torch.bfloat16
    assert torch.equal(made.layers[1].feed_forward.router_bias, stored[name])
    hf.save(made, tmp_path / "ours")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert after["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert torch.equal(after[name], stored[name])


@torch.no_grad()
def test_fp8_in_blocks_as_deepseek_ships_it(tmp_path: Path) -> None:
    """Codes and scales of every linear, experts' too, but of routers and the head, which no list of the folder names."""
    folder, high = tmp_path / "theirs", 16
    folder_of(folder, V3)
    stored, plain = {}, load_file(folder / "model.safetensors")
    for key, one in plain.items():
        if one.dim() != 2 or key.endswith(("mlp.gate.weight", "embed_tokens.weight", "lm_head.weight")):
            stored[key] = one
            continue
        rows, columns = (-(-length // high) for length in one.shape)
        scales = torch.zeros(rows, columns)
        for row in range(rows):
            for column in range(columns):
                block = one[row * high : (row + 1) * high, column * high : (column + 1) * high]
                scales[row, column] = block.abs().max() / 448
        wide = scales.repeat_interleave(high, 0)[: one.shape[0]].repeat_interleave(high, 1)[:, : one.shape[1]]
        stored[key], stored[f"{key}_scale_inv"] = (one / wide).to(torch.float8_e4m3fn), scales
        plain[key] = stored[key].float() * wide
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (3, 4), (
        "40 rows: a part of a block"
    )
    values = json.loads((folder / "config.json").read_text(encoding="utf8"))
    block = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [high, high]}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    expected = theirs(folder)(some_tokens()).logits
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": block}), encoding="utf8")
    made = hf.load(folder)
    torch.testing.assert_close(made(some_tokens()), expected, atol=1e-4, rtol=1e-4)
    hf.save(made, tmp_path / "ours")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    same = {key: after[key].view(torch.uint8).equal(one.view(torch.uint8)) for key, one in stored.items() if one.dim()}
    assert after.keys() == stored.keys() and all(same.values())


def test_a_shape_of_the_family_is_what_its_class_builds(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_layers": 3, "num_heads": 4, "intermediate_size": 40, "max_seq_len": 64}
    small = {"rope_dim": 8, "latent_dim": 16, "head_dim": 12}
    for family, router in (("deepseek_v2", "softmax"), ("deepseek_v3", "sigmoid")):
        shape = Shape(
            family=family, num_dense_layers=1, tie_embeddings=False, **sizes, mixers=({"kind": "mla", **small},)
        )
        config = shape.config(60)
        assert [layer.feed_forward.kind for layer in config.layers] == ["swiglu", "moe", "moe"]
        assert config.layers[1].feed_forward.router.kind == router
        values = to_hf(config)
        assert TRAINING not in values and values["kv_lora_rank"] == 16 and values["first_k_dense_replace"] == 1
        (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf8")
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        buffers = sum(one.numel() for key, one in model.named_buffers() if key.endswith("e_score_correction_bias"))
        assert config.num_params == model.num_parameters() + buffers
        # Of 8 experts a token visits 2, and the one that all share; everything else counts for every token.
        each = 3 * 48 * 40
        assert config.num_params - config.active_params == 2 * 6 * each
        assert config.kv_bytes_per_token(2) == 3 * (16 + 8) * 2
        usual = Shape(family=family, **sizes).config(60)
        assert usual.layers[0].mixer.kind == "mla" and usual.layers[0].mixer.rope_interleaved
    with pytest.raises(SpecError, match="num_dense_layers is 4, num_layers is 3"):
        Shape(**sizes, num_dense_layers=4).config(60)


@pytest.mark.parametrize("balance", [["bias"], [{"kind": "bias", "rate": 0.01}, "z_loss"], ["sequence_loss", "bias"]])
def test_what_a_training_reads_survives_a_folder(balance: list[Any]) -> None:
    config = from_hf({**V3, **SIZES, TRAINING: {"balance": balance, "capacity_factor": 1.5}})
    assert config.layers[1].feed_forward.capacity_factor == 1.5
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config


def test_a_loss_of_whole_batches_has_the_weight_of_its_class() -> None:
    """DeepSeek's alpha is what a balanced batch has; with ours that is weight x experts a token."""
    [loss] = from_hf({**V2, **SIZES, "seq_aux": False, "aux_loss_alpha": 0.003}).layers[1].feed_forward.balance
    assert loss.kind == "aux_loss" and loss.weight * 3 == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("v2", {"attention_bias": True}, "attention_bias is True"),
        ("v2", {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ("v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": None}, "topk_group is None"),
        ("v2", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("v3", {"n_group": 3}, "num_groups 3 does not divide 8 experts"),
        ("v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("v3", {"q_lora_rank": "1536"}, "q_lora_rank is '1536'"),
        ("v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("v3", {"n_shared_experts": 0}, "n_shared_experts is 0"),
        ("v3", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
        ("v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is of type 'linear'"),
        ("v3", {"rope_scaling": {**YARN, "mscale_all_dim": "1"}}, "mscale_all_dim is '1'"),
    ],
)
def test_a_broken_config_names_its_field(version: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        from_hf({**{"v2": V2_LITE, "v3": V3}[version], **SIZES, **changes})


@pytest.mark.parametrize(
    ("family", "entry", "said"),
    [
        (
            "deepseek_v2",
            {"router": {"kind": "softmax", "normalize": False}, "balance": ["bias"]},
            "has a router's bias",
        ),
        ("deepseek_v2", {"router": "sigmoid", "balance": ["bias"]}, "route by 'sigmoid'"),
        ("deepseek_v3", {"router": "sigmoid", "balance": []}, "is without a router's bias"),
        ("deepseek_v3", {"router": "sigmoid", "balance": ["bias"], "num_shared_experts": 0}, "n_shared_experts is 0"),
        ("deepseek_v2", {"router": "softmax"}, "norm_topk_prob is True"),
    ],
)
def test_a_stack_that_no_class_has_is_no_folder_of_the_family(family: str, entry: dict[str, Any], said: str) -> None:
    moe = {"kind": "moe", "num_experts": 4, "num_shared_experts": 1, **entry}
    shape = Shape(family=family, hidden_size=32, num_heads=4, num_kv_heads=4, num_layers=2, feed_forward=(moe,))
    with pytest.raises(SpecError, match=said):
        to_hf(shape.config(60))
