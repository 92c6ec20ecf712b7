"""Every family with the options of published models: llama.cpp computes hone's logits; keys and tensors are those of gguf-py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.errors import SpecError
from hone.exports.api import export
from hone.exports.gguf.architectures import ARCHITECTURES, hyperparameters
from hone.model.context import Causal
from hone.model.families import FAMILIES
from hone.model.hf import load
from hone.model.shape import Shape
from tests.conftest import byte_tokenizer
from tests.exports.gguf.llama_cpp import LlamaCpp
from tests.exports.gguf.test_export import metadata, tensors
from tests.exports.gguf.test_llama_cpp import TOKENS, distance
from tests.model.families.published import PUBLISHED, YARN, longrope, make_folder

LONG = {"original_max_position_embeddings": 512, "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
GEMMA2, GEMMA3, GRANITE = (PUBLISHED[name] for name in ("gemma2", "gemma3-1b", "granite3"))
STRONG = {**GRANITE, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "embedding_multiplier": 2.0}
"""Attention, and so the positions, count for more."""
COMPUTED: dict[str, dict[str, Any]] = {
    "phi3-mini-4k": {**PUBLISHED["phi3-mini-4k"], "sliding_window": 2047},
    "phi3-mini-128k": {**PUBLISHED["phi3-mini-128k"], **LONG},
    "phi4-mini": {**PUBLISHED["phi4-mini"], **LONG},
    "granite3": GRANITE,
    "granite-biases": {**GRANITE, "attention_bias": True, "mlp_bias": True},
    "granite-llama3": {**STRONG, "max_position_embeddings": 256, "rope_scaling": LLAMA3},
    "granite-longrope": {**STRONG, **LONG, "rope_scaling": longrope(8)},
    "llama-longrope": {**PUBLISHED["llama-linear"], **LONG, "rope_scaling": longrope(8)},
    "olmo2": PUBLISHED["olmo2"],
    "olmo2-tied-yarn": {**PUBLISHED["olmo2"], "tie_word_embeddings": True, "rope_scaling": YARN, "max_position_embeddings": 128},
    "gemma2": GEMMA2,
    "gemma2-27b": {**PUBLISHED["gemma2-27b"], "num_hidden_layers": 46, "query_pre_attn_scalar": 16},
    "gemma2-each-third-full": {**GEMMA2, "layer_types": [LOCAL, LOCAL, FULL, LOCAL], "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma2-all-local": {**GEMMA2, "layer_types": [LOCAL] * 4},
    "gemma2-all-full": {**GEMMA2, "layer_types": [FULL] * 4},
    "gemma3-1b": {**GEMMA3, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    "gemma3-4b": {**PUBLISHED["gemma3-4b-text"], "query_pre_attn_scalar": 32, "final_logit_softcapping": 5.0},
    "gemma3-own-head-all-full": {**GEMMA3, "tie_word_embeddings": False, "layer_types": [FULL] * 4},
    "smollm3": PUBLISHED["smollm3"],
    "smollm3-yarn": {**PUBLISHED["smollm3"], "rope_scaling": YARN, "max_position_embeddings": 128},
}  # fmt: skip
"""Published configs and options of theirs, by a name for the test."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "smollm3-each-second": ({**PUBLISHED["smollm3"], "no_rope_layers": [1, 0, 1, 0]}, r"in layers \[3\] of a smollm3 .* this one in \[1, 3\]"),
    "smollm3-biases": ({**PUBLISHED["smollm3"], "mlp_bias": True}, "no biases on the feed-forward of smollm3"),
    "smollm3-llama3": ({**PUBLISHED["smollm3"], "rope_scaling": LLAMA3}, "scaling 'llama3' of smollm3"),
    "gemma2-own-head": ({**GEMMA2, "tie_word_embeddings": False}, "has no head besides the embedding"),
    "gemma2-no-softcap": ({**GEMMA2, "attn_logit_softcapping": None}, "always caps the attn logits"),
    "gemma2-scale": ({**GEMMA2, "query_pre_attn_scalar": 18}, "scales the scores of a gemma2 model with 4 layers by 0.17"),
    "gemma2-biases": ({**GEMMA2, "attention_bias": True}, "no biases on queries, keys and values of gemma2"),
    "gemma2-first-full": ({**GEMMA2, "layer_types": [FULL, LOCAL, LOCAL, LOCAL]}, r"all layers but each n-th, this model in \[1, 2, 3\]"),
    "gemma3-yarn": ({**GEMMA3, "rope_scaling": YARN}, "scaling 'yarn' of gemma3"),
    "olmo2-narrow-heads": ({**PUBLISHED["olmo2"], "head_dim": 32}, "hidden_size 64"),
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory):
    """published(values): a folder with that config.json, small sizes, random weights and a byte-level tokenizer."""
    tokenizer = byte_tokenizer()
    small = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None,
    }  # fmt: skip

    def make(values: dict[str, Any]) -> Path:
        folder = make_folder(tmp_path_factory.mktemp(values["model_type"]), {**small, **values}, std=0.1)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def test_every_family_without_experts_has_an_architecture() -> None:
    assert set(ARCHITECTURES) == {name for name, one in FAMILIES.items() if one.experts is None}


@torch.no_grad()
@pytest.mark.parametrize("name", COMPUTED)
def test_llama_cpp_computes_what_hone_computes(name: str, published, tmp_path: Path) -> None:
    folder = published(COMPUTED[name])
    made, model = export(folder, tmp_path / "model.gguf", type="f32"), load(folder, dtype=torch.float32)
    by_length = "longrope" in " ".join(made.notes)
    wanted = torch.zeros(1)
    for seq_len in (256, 1024) if by_length else (256,):
        context = Causal(torch.tensor([TOKENS]))
        context.rope_len = seq_len
        before, wanted = wanted, model(torch.tensor([TOKENS]), context)[0]
        theirs = LlamaCpp(made.path, seq_len)
        found = torch.from_numpy(theirs.logits(TOKENS))
        theirs.close()
        # Its cache of keys is float16, which adds up over layers.
        assert distance(found, wanted) < (0.02 if model.config.num_layers < 5 else 0.06), seq_len
    assert not by_length or distance(before, wanted) > 0.05, "the divisors change nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_architecture_cannot_express_is_refused(name: str, published, tmp_path: Path) -> None:
    values, message = REFUSED[name]
    with pytest.raises(SpecError, match=message) as error:
        export(published(values), tmp_path / "model.gguf")
    assert error.value.fix and not list(tmp_path.iterdir())


def test_sinks_have_no_tensor() -> None:
    sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96}
    config = Shape(**sizes, mixers=({"kind": "attention", "sinks": True},)).config(60)
    with pytest.raises(SpecError, match="attention of layer 0 has sinks"):
        hyperparameters(config, "here")


@pytest.mark.parametrize("name", [name for name in COMPUTED if name != "gemma2-27b"])
def test_tensors_are_those_of_gguf_py(name: str, published, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = published(COMPUTED[name])
    made, model = export(folder, tmp_path / "model.gguf", type="f32"), load(folder, dtype=torch.float32)
    arch = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[ARCHITECTURES[model.config.family].name]
    layers = range(model.config.num_layers)
    known = {gguf.TENSOR_NAMES[one].format(bid=index) for one in gguf.MODEL_TENSORS[arch] for index in layers}
    found = tensors(made.path)
    # llama.cpp reads divisors of frequencies wherever a scaling has them; gguf-py lists them for some architectures.
    factors = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    assert {one.rpartition(".")[0] for one in found.keys() - factors} <= known
    norms = {
        "mixer_norm": "attn_norm", "mixer_post_norm": "post_attention_norm", "feed_forward_norm": "ffn_norm",
        "feed_forward_post_norm": "post_ffw_norm", "mixer.q_norm": "attn_q_norm", "mixer.k_norm": "attn_k_norm",
    }  # fmt: skip
    for index, layer in enumerate(model.layers):
        modules = dict(layer.named_modules())
        for path, stored in norms.items():
            there = f"blk.{index}.{stored}.weight"
            assert (there in found) == (path in modules)
            if path in modules:
                weight = modules[path].weight.detach() + model.config.norm_offset
                assert np.array_equal(found[there], weight.numpy()), path
    assert np.array_equal(found["output_norm.weight"], (model.norm.weight + model.config.norm_offset).detach().numpy())
    fused = model.config.family == "phi3"
    assert ("blk.0.attn_qkv.weight" in found) == fused and ("blk.0.ffn_gate.weight" in found) != fused
    if fused:
        for stored, linear in (
            ("attn_qkv", model.layers[1].mixer.qkv),
            ("ffn_up", model.layers[1].feed_forward.gate_up),
        ):
            assert np.array_equal(found[f"blk.1.{stored}.weight"], linear.weight.detach().numpy())
    if name == "olmo2-tied-yarn":
        assert np.array_equal(found["output.weight"], found["token_embd.weight"])


KEYS = {
    "phi3-mini-4k": {"Attention.SLIDING_WINDOW": 2047, "Attention.HEAD_COUNT_KV": 2, "LLM.FEED_FORWARD_LENGTH": 96},
    "phi4-mini": {
        "Rope.DIMENSION_COUNT": 12, "Rope.SCALING_TYPE": "longrope", "Rope.SCALING_ORIG_CTX_LEN": 512,
        "Rope.SCALING_ATTN_FACTOR": pytest.approx((1 + np.log(8) / np.log(512)) ** 0.5, rel=1e-6), "LLM.CONTEXT_LENGTH": 4096,
    },
    "granite3": {
        "LLM.EMBEDDING_SCALE": 12.0, "LLM.RESIDUAL_SCALE": pytest.approx(0.22, rel=1e-6), "LLM.LOGIT_SCALE": 8.0,
        "Attention.SCALE": 0.15625,
    },
    "olmo2": {"Attention.LAYERNORM_RMS_EPS": pytest.approx(1e-6, rel=1e-6), "Rope.FREQ_BASE": 500000.0},
    "gemma2": {
        "LLM.ATTN_LOGIT_SOFTCAPPING": 50.0, "LLM.FINAL_LOGIT_SOFTCAPPING": 30.0, "Attention.SLIDING_WINDOW": 9,
        "Attention.KEY_LENGTH": 32, "Attention.VALUE_LENGTH": 32,
    },
    "gemma2-each-third-full": {"Attention.SLIDING_WINDOW_PATTERN": 3},
    "gemma3-4b": {
        "Rope.FREQ_BASE": 1e6, "Rope.FREQ_BASE_SWA": 1e4, "Rope.SCALING_TYPE": "linear", "Rope.SCALING_FACTOR": 8.0,
        "Attention.SLIDING_WINDOW_PATTERN": 3,
    },
    "smollm3": {"Rope.DIMENSION_COUNT": 16, "Attention.HEAD_COUNT": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_those_of_gguf_py(name: str, published, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    found = metadata(export(published(COMPUTED[name]), tmp_path / "model.gguf", type="f32").path)
    arch = found[gguf.Keys.General.ARCHITECTURE]
    for key, value in KEYS[name].items():
        group, _, constant = key.partition(".")
        assert found[getattr(getattr(gguf.Keys, group), constant).format(arch=arch)] == value, key
    assert (f"{arch}.attention.sliding_window_pattern" in found) == ("Attention.SLIDING_WINDOW_PATTERN" in KEYS[name])
