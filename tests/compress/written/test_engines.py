"""Engines that are to load a folder: what they refuse is an error before the work; defaults load where the documentation says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.base.errors import SpecError
from hone.compress import QUANTIZERS
from hone.compress.written import engines

ROWS = {"bits": 8, "group_size": 0}


def block_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]


@pytest.mark.parametrize("kind", ["rtn", "hqq", "gptq", "gptaq", "autoround"])
def test_weights_of_8_bits_alone_are_packed(kind: str) -> None:
    """vLLM 0.24 and 0.26 refuse int-quantized without rounded inputs."""
    step = QUANTIZERS.read({"kind": kind, **ROWS})
    assert step.scheme(64).layout == "pack-quantized"
    both = QUANTIZERS.read({"kind": kind, **ROWS, "activations": "int8_token"})
    assert both.scheme(64).layout == "int-quantized"


def test_fp8_rounds_inputs_unless_told_not_to(family_folder, compress) -> None:
    """vLLM 0.24 has no kernel for FP8 weights alone on a GPU with FP8 products."""
    folder = family_folder("llama")
    made = compress(folder, {"kind": "fp8"})
    assert block_of(made.folder)["input_activations"]["strategy"] == "token"
    assert block_of(made.folder)["input_activations"]["dynamic"] is True
    alone = compress(folder, {"kind": "fp8", "activations": "none"}, name="alone")
    assert block_of(alone.folder)["input_activations"] is None
    assert "vLLM" in alone.techniques[0]["note"] and "note" not in made.techniques[0]
    blocks = QUANTIZERS.read({"kind": "fp8", "strategy": "block"})
    assert blocks.rounding is None
    assert blocks.model_copy(update={"layout": "float-quantized"}).rounding.group_size == 128


@pytest.mark.parametrize(
    ("engine", "step", "message"),
    [
        ("vllm", {"kind": "rtn", **ROWS, "layout": "int-quantized"}, "activations none, at layers.0.mixer.qkv"),
        ("vllm", {"kind": "rtn", "bits": 3, "group_size": 32, "layout": "gptq"}, "3 bits, strategy group, in gptq"),
        ("vllm", {"kind": "rtn", "group_size": 16}, "groups of 16"),
        ("vllm", {"kind": "rtn", "bits": 3, "group_size": 32, "symmetric": False}, "asymmetric int weights of 3 bits"),
        ("vllm", {"kind": "mxfp4", "activations": "mxfp4"}, "mxfp4-pack-quantized with activations mxfp4"),
        ("vllm", {"kind": "llm_int8"}, "the layout llm-int8"),
        ("vllm", {"kind": "sorted_groups", "group_size": 32}, "groups of sorted columns"),
        ("vllm", {"kind": "block_int8", "block_size": 32}, "strategy block, in int-quantized"),
        ("vllm", {"kind": "svd", "ratio": 0.5}, r"factors in place of weights \(svd\)"),
        (
            "transformers",
            {"kind": "rtn", "layout": "gptq", "group_size": 32, "rules": {"match": "down_proj", "bits": 8}},
            "differ",
        ),
        ("transformers", {"kind": "svd", "ratio": 0.5}, r"factors in place of weights \(svd\)"),
        ("llama.cpp", {"kind": "rtn", "group_size": 16}, "4 bits, strategy group, in pack-quantized"),
        ("llama.cpp", {"kind": "fp8", "activations": "none"}, "e4m3 weights"),
        ("llama.cpp", {"kind": "sorted_groups", "group_size": 32}, "strategy group, in gptq"),
        ("llama.cpp", {"kind": "block_int8", "block_size": 16}, "strategy block"),
        ("llama.cpp", {"kind": "rtn", **ROWS, "activations": "int8_token"}, "the rounding of inputs"),
    ],
)
def test_what_an_engine_does_not_load_is_an_error(
    engine: str, step: dict, message: str, family_folder, compress
) -> None:
    with pytest.raises(SpecError, match=f"{engine} does not load .*{message}.*\nfix: .*engine=any"):
        compress(family_folder("llama"), step, engine=engine)


@pytest.mark.parametrize(
    ("engine", "step"),
    [
        ("vllm", {"kind": "rtn", "group_size": 32}),
        ("vllm", {"kind": "rtn", **ROWS}),
        ("vllm", {"kind": "fp8"}),
        ("vllm", {"kind": "fp8", "activations": "none"}),
        ("vllm", {"kind": "nvfp4", "activations": "none"}),
        ("llama.cpp", {"kind": "rtn", "group_size": 32, "scale_dtype": "float16"}),
        ("llama.cpp", {"kind": "rtn", **ROWS}),
        ("transformers", {"kind": "nf4", "block_size": 32}),
        ("transformers", {"kind": "block_int8", "block_size": 32}),
        ("hone", {"kind": "svd", "ratio": 0.5}),
    ],
)
def test_what_an_engine_loads_is_written(engine: str, step: dict, family_folder, compress) -> None:
    assert compress(family_folder("llama"), step, engine=engine).figures["model_bytes"].value > 0


def test_every_bit_that_an_allocation_may_give_is_checked(family_folder, compress, calibration_text) -> None:
    allocation = {"kind": "hessian", "bits": [3, 4], "bits_per_weight": 3.8}
    step = {"kind": "rtn", "group_size": 32, "layout": "gptq"}
    with pytest.raises(SpecError, match=r"vllm does not load .*3 bits"):
        compress(
            family_folder("llama"),
            step,
            engine="vllm",
            allocation=allocation,
            calibration_text=str(calibration_text),
        )


def test_a_fit_counts_the_folder(family_folder, compress) -> None:
    with pytest.raises(SpecError, match=r"give steps for llama\.cpp"):
        compress(family_folder("llama"), fit="100KB", engine="llama.cpp")


def test_the_table_of_vllm_is_that_of_the_ledger() -> None:
    """Every format that a run of vLLM loaded is one that engine=vllm allows, and every refused one is not."""
    from benchmarks.load_in_vllm import FORMATS, LEDGER

    latest = {row["format"]: row for row in map(json.loads, LEDGER.read_text(encoding="utf8").splitlines())}
    untried = FORMATS.keys() - latest.keys()  # refused: tests/compress/test_embedding.py
    assert latest.keys() <= FORMATS.keys() and all(name.endswith("-embedding") for name in untried)
    differing = []
    for name, row in latest.items():
        steps = [QUANTIZERS.read(step) for step in FORMATS[name] if step["kind"] in QUANTIZERS.rows]
        schemes = tuple(("m", step.scheme(512), 512) for step in steps)
        try:
            engines.check("vllm", engines.Written(None, schemes))
            allowed = True
        except engines.Refused:
            allowed = False
        if allowed != (row["value"] is not None):
            differing.append(name)
    assert differing == []
