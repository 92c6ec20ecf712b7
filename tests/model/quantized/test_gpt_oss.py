"""gpt-oss's experts in MXFP4: every code and scale as transformers dequantizes them, folders in and out, and the engine's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import dequantize_convertops

from hone.base.errors import ArtifactError
from hone.model import hf
from hone.model.facts import CheckpointFacts
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.layouts import read
from hone.model.quantized.methods.mxfp4 import SCHEME
from hone.model.weights.stacked import ApartExperts, stack_experts
from tests.model.families.published import SMALL
from tests.model.families.test_experts import GPT_OSS

BLOCK = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
SIZES = {**GPT_OSS, **SMALL, "num_hidden_layers": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
SIZES |= {"layer_types": ["sliding_attention", "full_attention"]}


def published(folder: Path) -> Path:
    """A folder as gpt-oss is published: bf16 with experts in MXFP4, random codes, scales from 2^-7 to 2^-4."""
    folder.mkdir()
    config = transformers.AutoConfig.for_model(**{**SIZES, "dtype": "bfloat16"})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_(*((0.5, 0.2) if parameter.dim() == 1 else (0.0, 0.12)))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = {**SIZES, "dtype": "bfloat16", "quantization_config": BLOCK}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf8")
    return folder


def theirs(folder: Path) -> transformers.PreTrainedModel:
    """transformers' model in float32, from weights that it dequantizes itself."""
    kept = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **kept).eval()


def test_every_code_and_scale_is_transformers_own() -> None:
    scales = torch.arange(1, 250, dtype=torch.uint8)  # 6 * 2^(250 - 127) is float32's and bfloat16's last but a few
    pairs = torch.arange(256, dtype=torch.uint8).view(16, 16)  # all pairs of two codes, in 16 blocks of 32
    blocks = pairs.expand(1, len(scales), 16, 16).contiguous()
    shared = scales[None, :, None].expand(1, -1, 16).contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        wanted = dequantize_convertops(blocks, shared, dtype)[0].T  # they store [E, K, N]
        part = {"weight_packed": blocks[0].flatten(1), "weight_scale": shared[0]}
        found = read(SCHEME, part, 512).weight(dtype)
        assert len(found.float().abs().unique()) > 200 and torch.equal(found, wanted)


@torch.no_grad()
def test_published_folders_are_computed_as_stored_and_written_again(tmp_path: Path) -> None:
    folder, saved = published(tmp_path / "theirs"), tmp_path / "ours"
    ours, model = hf.load(folder, dtype=torch.float32), theirs(folder)
    assert all(type(one) is Dequantizing for layer in ours.layers for one in layer.feed_forward.gate_up)
    tokens = torch.randint(3, SMALL["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)
    facts = CheckpointFacts.of(folder)
    assert facts.packed and facts.loaded_bytes("bfloat16") < 0.7 * facts.config.num_params * 2
    hf.save(ours, saved, dtype=torch.bfloat16)
    before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((saved / "config.json").read_text())["quantization_config"] == BLOCK
    torch.testing.assert_close(theirs(saved)(tokens).logits, expected, atol=1e-6, rtol=1e-6)


class Held:
    """Tensors in memory as a source."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def file(self, name: str) -> Path:
        return Path("model.safetensors")


@pytest.mark.parametrize("packed", [False, True])
def test_experts_apart_and_stacked_again_are_the_same(packed: bool) -> None:
    at = "model.layers.3.mlp.experts"
    if packed:
        whole = {f"{at}.gate_up_proj_blocks": torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)}
        whole[f"{at}.gate_up_proj_scales"] = torch.randint(0, 256, (3, 10, 2), dtype=torch.uint8)
    else:
        whole = {f"{at}.gate_up_proj": torch.randn(3, 64, 10), f"{at}.down_proj": torch.randn(3, 5, 64)}
    whole |= {f"{at}.gate_up_proj_bias": torch.randn(3, 10), "model.norm.weight": torch.randn(4)}
    apart = ApartExperts(Held(whole), STACKED)  # type: ignore[arg-type]
    tensors = {name: apart.tensor(name) for name in apart.names()}
    assert all(tuple(tensor.shape) == apart.shape(name) for name, tensor in tensors.items())
    assert torch.equal(tensors[f"{at}.2.up_proj.bias"], whole[f"{at}.gate_up_proj_bias"][2, 1::2])
    if not packed:
        gate = whole[f"{at}.gate_up_proj"][1, :, 0::2].T
        assert torch.equal(tensors[f"{at}.1.gate_proj.weight"], gate)
        assert torch.equal(apart.part(f"{at}.1.gate_proj.weight", (slice(1, 3),)), gate[1:3])
    again = dict(stack_experts(reversed(list(tensors.items())), STACKED))
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("gate_up_proj", (3, 8, 9), r"gate_up_proj has shape \[3, 8, 9\]"),
        ("gate_up_proj_blocks", (3, 8, 2, 8), r"gate_up_proj_blocks has shape"),
        ("down_proj_scales", (3, 8), r"down_proj_scales has shape"),
    ],
)
def test_tensors_of_other_shapes_are_named(name: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        ApartExperts(Held({f"model.layers.0.mlp.experts.{name}": torch.zeros(shape)}), STACKED)  # type: ignore[arg-type]


def test_experts_with_other_tensors_are_no_stack() -> None:
    named: dict[str, Any] = {"model.layers.0.mlp.experts.0.up_proj.weight_zero_point": torch.zeros(4)}
    with pytest.raises(ArtifactError, match="weight_zero_point has no place"):
        list(stack_experts(named.items(), STACKED))
