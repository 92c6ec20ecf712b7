"""gpt-oss through compression: experts in MXFP4 as it is published, others in hone's own format, cuts and masks for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hone.base.errors import SpecError
from hone.compress.stage import Compress
from hone.measure.machine import describe
from hone.model import hf
from hone.model.facts import CheckpointFacts
from hone.model.quantized.dequantizing import Dequantizing
from tests.compress.conftest import must_serve_what_it_computes, stopped_before

MXFP4 = {"kind": "mxfp4", "layout": "mxfp4"}
EXPERTS = {"targets": [r"\.experts\."]}
TOKENS = torch.arange(2 * 40).reshape(2, 40) % 250


@pytest.fixture
def folder(family_folder) -> Path:
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}
    return family_folder("gpt_oss", intermediate_size=32, **moe)


@torch.no_grad()
def ours(folder: Path) -> torch.Tensor:
    return hf.load(folder)(TOKENS)


@torch.no_grad()
def theirs(folder: Path) -> torch.Tensor:
    kept = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **kept).eval()(TOKENS).logits


def test_experts_in_mxfp4_are_loaded_by_transformers(folder: Path, compress, calibration_text: Path) -> None:
    options = {**EXPERTS, "calibration_text": str(calibration_text), "engine": "transformers"}
    made = compress(folder, MXFP4, **options)
    values = json.loads((made.folder / "config.json").read_text(encoding="utf8"))
    block = values["quantization_config"]
    assert values["model_type"] == "gpt_oss" and block["quant_method"] == "mxfp4"
    assert {"lm_head", "model.layers.1.self_attn.o_proj", "model.layers.0.mlp.router"} <= {
        *block["modules_to_not_convert"]
    }
    layers = hf.load(made.folder).layers
    assert all(type(one) is Dequantizing for layer in layers for one in layer.feed_forward.down)
    expected = ours(made.folder)
    torch.testing.assert_close(theirs(made.folder), expected, atol=1e-4, rtol=1e-4)
    dense = ours(folder)
    assert 0.001 < float((expected - dense).norm() / dense.norm()) < 0.3
    size = made.figures["model_bytes"]
    assert size.value == size.estimate.value == sum(one.stat().st_size for one in made.folder.glob("*.safetensors"))
    must_serve_what_it_computes(made.folder)


def test_a_killed_compression_goes_on_with_the_same_experts(folder: Path, compress, calibration_text: Path) -> None:
    options = {**EXPERTS, "calibration_text": str(calibration_text)}
    whole = compress(folder, MXFP4, name="whole", **options).folder
    with stopped_before(1):
        compress(folder, MXFP4, name="killed", **options)
    again = compress(folder, MXFP4, name="killed", **options).folder
    files = sorted(one.name for one in whole.glob("*.safetensors"))
    assert files and all((whole / name).read_bytes() == (again / name).read_bytes() for name in files)


@pytest.mark.parametrize("step", [{"kind": "experts", "num_experts": 3}, {"kind": "magnitude", "sparsity": 0.5}])
def test_what_stays_dense_is_a_folder_of_the_family(step: dict, folder: Path, compress, calibration_text: Path) -> None:
    made = compress(folder, step, calibration_text=str(calibration_text))
    expected = ours(made.folder)
    torch.testing.assert_close(theirs(made.folder), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(ours(folder), expected, atol=1e-2)
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value


def test_other_codes_of_experts_are_in_hones_own_format(folder: Path, compress, calibration_text: Path) -> None:
    made = compress(folder, {"kind": "gptq", "group_size": 16}).folder
    assert json.loads((made / "config.json").read_text(encoding="utf8"))["model_type"] == "hone"
    logits, dense = ours(made), ours(folder)
    assert 0 < float((logits - dense).norm() / dense.norm()) < 0.5
    rows = [json.loads(line) for line in (made / "layers.jsonl").read_text(encoding="utf8").splitlines()]
    assert sum(".experts." in one for row in rows for one in row["modules"]) == 2 * 4 * 3
    must_serve_what_it_computes(made)


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("gpt_oss", {}, "would quantize model.layers.0.self_attn.q_proj"),
        (
            "gpt_oss",
            {**EXPERTS, "ignore": [r"\.experts\.2\.", "lm_head"]},
            r"leave out model.layers.0.mlp.experts.2.gate_proj",
        ),
        ("mixtral", EXPERTS, "this model is of family mixtral"),
        (
            "gpt_oss",
            {**EXPERTS, "engine": "vllm"},
            "vllm does not load experts in the layout mxfp4 as hone writes them",
        ),
    ],
)
def test_what_the_layout_has_no_place_for_is_named(
    family: str, more: dict, said: str, folder: Path, family_folder
) -> None:
    if family != "gpt_oss":
        folder = family_folder(family, num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(SpecError, match=said):
        Compress.read({"steps": [MXFP4], **more}).plan({"model": CheckpointFacts.of(folder)}, describe())
