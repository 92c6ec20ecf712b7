"""Published families with experts through compression: experts that leave or are merged for transformers, and quantized ones that the engine serves."""

from __future__ import annotations

import json

import pytest
import torch

from hone.model import hf
from tests.compress.conftest import must_serve_what_it_computes

ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**ROUTED, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**ROUTED, "head_dim": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 32, "n_group": 1, "topk_group": 1},
}


def _with_experts(family: str) -> int:
    """Layers of two with experts."""
    return 2 - FAMILIES[family].get("first_k_dense_replace", 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experts", "expert_merging"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_loads_with_fewer_experts(family, kind, family_folder, compress, calibration_text):
    import transformers

    folder = family_folder(family, **FAMILIES[family])
    made = compress(
        folder, {"kind": kind, "num_experts": 3}, name=f"{family}-{kind}", calibration_text=str(calibration_text)
    ).folder
    values = json.loads((made / "config.json").read_text(encoding="utf8"))
    assert values["model_type"] == family
    count = {"mixtral": "num_local_experts", "deepseek_v2": "n_routed_experts", "deepseek_v3": "n_routed_experts"}
    assert values[count.get(family, "num_experts")] == 3
    ours = hf.load(made)
    layers = [layer.feed_forward for layer in ours.config.layers]
    assert [one.num_experts for one in layers if one.kind == "moe"] == [3] * _with_experts(family)
    kept = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, **kept).eval()
    tokens = torch.arange(2 * 40).reshape(2, 40) % 250
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(hf.load(folder)(tokens), expected, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_what_transformers_loads_of_narrower_models_with_experts(family, family_folder, compress, calibration_text):
    import transformers

    folder = family_folder(family, **{**FAMILIES, "gpt_oss": {**FAMILIES["mixtral"], "head_dim": 16}}[family])
    step = {"kind": "width", "hidden_size": 32, "num_heads": 2}
    made = compress(folder, step, name=f"{family}-width", calibration_text=str(calibration_text)).folder
    ours = hf.load(made)
    assert ours.config.hidden_size == 32 and ours.config.layers[0].mixer.num_heads == 2
    kept = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, **kept).eval()
    tokens = torch.arange(2 * 40).reshape(2, 40) % 250
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_experts_are_served(family, family_folder, compress, calibration_text):
    folder = family_folder(family, **FAMILIES[family])
    made = compress(
        folder, {"kind": "gptq", "group_size": 16}, name=f"{family}-gptq", calibration_text=str(calibration_text)
    ).folder
    dense, quantized = hf.load(folder), hf.load(made)
    tokens = torch.arange(2 * 40).reshape(2, 40) % 250
    with torch.no_grad():
        logits, close = dense(tokens), quantized(tokens)
    assert 0 < float((close - logits).norm() / logits.norm()) < 0.5
    rows = [json.loads(line) for line in (made / "layers.jsonl").read_text(encoding="utf8").splitlines()]
    assert sum(".experts." in one for row in rows for one in row["modules"]) == _with_experts(family) * 4 * 3
    assert not any(one.endswith("mlp.gate") or "router" in one for row in rows for one in row["modules"])
    must_serve_what_it_computes(made)
