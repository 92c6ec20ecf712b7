"""Published configs with experts and random weights against transformers: logits, saved folders both ways, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hone.base.errors import SpecError
from hone.model import hf
from hone.model.families import FAMILIES
from hone.model.families.config_json import from_hf, to_hf
from hone.model.families.experts_json import TRAINING
from hone.model.shape import Shape
from hone.model.weights.stacked import stack_experts
from tests.model.families.published import SMALL

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": False, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 64, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3,
    "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu",
    "max_position_embeddings": 64, "max_window_layers": 28, "moe_intermediate_size": 24, "norm_topk_prob": False,
    "num_experts": 6, "num_experts_per_tok": 4, "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48, "sliding_window": 32768, "tie_word_embeddings": False,
    "use_sliding_window": False,
}  # fmt: skip
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_act": "silu",
    "max_position_embeddings": 64, "norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 3, "head_dim": 16,
    "hidden_act": "silu", "initial_context_length": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 64, "num_experts_per_tok": 3, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-5, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "rope_type": "yarn", "truncate": False}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 9,
    "swiglu_limit": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "mixtral-window": {**MIXTRAL, "sliding_window": 9},
    "qwen3-moe": QWEN3,
    "qwen3-moe-dense-layers": {**QWEN3, "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    "qwen2-moe": QWEN2,
    "olmoe": OLMOE,
    "gpt-oss": GPT_OSS,
    "gpt-oss-plain-rope": {
        **{name: one for name, one in GPT_OSS.items() if name != "layer_types"},
        "rope_scaling": {"rope_type": "default"},
    },
}


def theirs(folder: Path) -> transformers.PreTrainedModel:
    kept = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **kept).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_equal_transformers_both_ways(name: str, tmp_path: Path) -> None:
    values, folder, saved = {**PUBLISHED[name], **SMALL}, tmp_path / "theirs", tmp_path / "ours"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf8")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).float()
    for parameter in model.parameters():
        parameter.normal_(*((0.5, 0.2) if parameter.dim() == 1 else (0.0, 0.12)))
    model.save_pretrained(folder)
    model, ours = theirs(folder), hf.load(folder)
    assert ours.config == from_hf(values), "as published, and as transformers 5 writes it again"
    assert sum(one.numel() for one in ours.parameters()) == ours.config.num_params == model.num_parameters()
    tokens = torch.randint(3, SMALL["vocab_size"], (2, 57), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)
    hf.save(ours, saved)
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    torch.testing.assert_close(theirs(saved)(tokens).logits, expected, atol=1e-6, rtol=1e-6)


def test_gradients_of_gpt_oss_equal_transformers(tmp_path: Path) -> None:
    """Of sinks, of the router's and the experts' biases, and through clamps, as of everything else."""
    values = {**GPT_OSS, **SMALL, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**values, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(*((0.5, 0.2) if parameter.dim() == 1 else (0.0, 0.12)))
    model.save_pretrained(tmp_path)
    ours, tokens = hf.load(tmp_path), torch.randint(3, SMALL["vocab_size"], (2, 40))
    flow = torch.randn(2, 40, SMALL["vocab_size"])
    for one in (ours(tokens), model(tokens).logits):
        (one * flow).sum().backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    with torch.no_grad():
        for one in ours.parameters():
            assert one.grad is not None
            one.copy_(one.grad)
    stacked = FAMILIES["gpt_oss"].stacked
    found = dict(stack_experts(hf.state(ours), stacked))
    assert found.keys() == wanted.keys() and wanted["model.layers.0.self_attn.sinks"].abs().min() > 1e-3
    for name, one in found.items():
        torch.testing.assert_close(one, wanted[name], atol=1e-4 * float(wanted[name].abs().max()), rtol=1e-3)


def test_layers_without_experts_are_where_the_config_says() -> None:
    kinds = [layer.feed_forward.kind for layer in from_hf({**PUBLISHED["qwen3-moe-dense-layers"], **SMALL}).layers]
    assert kinds == ["swiglu", "swiglu", "swiglu", "moe"]
    made = from_hf({**QWEN3, **SMALL, "mlp_only_layers": [0]})
    assert [layer.feed_forward.kind for layer in made.layers] == ["swiglu", "moe", "moe", "moe"]
    assert [layer.feed_forward.intermediate_size for layer in made.layers] == [96, 24, 24, 24]


def test_what_a_training_reads_survives_a_folder_of_the_family() -> None:
    own = {"kind": "moe", "num_experts": 4, "intermediate_size": 16, "capacity_factor": 1.25, "jitter": 0.01}
    shape = Shape(family="mixtral", hidden_size=32, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward=(own,))
    for balance in (
        [],
        [{"kind": "aux_loss", "weight": 0.3}],
        ["bias"],
        ["aux_loss", {"kind": "z_loss", "weight": 0.1}],
    ):
        made = shape.model_copy(update={"feed_forward": ({**own, "balance": balance},)}).config(60)
        if balance == ["bias"]:  # a tensor that no class of the family has
            with pytest.raises(SpecError, match="router's bias"):
                to_hf(made)
            continue
        values = json.loads(json.dumps(to_hf(made)))
        assert from_hf(values) == made and set(values[TRAINING]) >= {"capacity_factor", "jitter"}
    plain = shape.model_copy(update={"feed_forward": ({"kind": "moe", "num_experts": 4, "intermediate_size": 16},)})
    assert TRAINING not in to_hf(plain.config(60))


@pytest.mark.parametrize("router", ["sigmoid", "switch", {"kind": "softmax", "num_groups": 2}])
def test_a_router_that_the_family_does_not_have_is_no_folder_of_it(router: Any) -> None:
    entry = {"kind": "moe", "num_experts": 4, "router": router}
    shape = Shape(family="qwen3_moe", hidden_size=32, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward=(entry,))
    with pytest.raises(SpecError, match="cannot express this model"):
        to_hf(shape.config(60))


def test_shared_experts_have_the_width_of_the_others() -> None:
    assert from_hf({**QWEN2, **SMALL}).layers[0].feed_forward.num_shared_experts == 2
    with pytest.raises(
        SpecError, match="shared_expert_intermediate_size is 50, no multiple of moe_intermediate_size 24"
    ):
        from_hf({**QWEN2, **SMALL, "shared_expert_intermediate_size": 50})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": "8"}, "num_experts is '8'"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok is True"),
        ({"num_experts_per_tok": 9}, "sends a token to 9 of 8 experts"),
        ({"moe_intermediate_size": 2.5}, "moe_intermediate_size is 2.5"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'"),
        ({TRAINING: {"top_k": 1}}, f"{TRAINING} is"),
        ({"router_aux_loss_coef": "x"}, "weight"),
    ],
)
def test_a_broken_config_names_its_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        from_hf({**QWEN3, **SMALL, **changes})
