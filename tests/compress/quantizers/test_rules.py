"""Rules by pattern: matrices with bits and groups of their own, in every integer quantizer, layout, loader and the server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hone.base.errors import SpecError
from hone.compress.stage import Compress
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts
from hone.model.hf import load
from tests.compress.conftest import must_serve_what_it_computes, stopped_before
from tests.compress.written.test_export import transformers_logits

DOWN = {"match": "re:.*down_proj", "bits": 8}
FIRST = {"match": r"re:.*layers\.0\..*(q|k|v)_proj", "bits": 6, "group_size": 16}
TOKENS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
QUANTIZERS = {
    "gptq": ({"kind": "gptq"},),
    "gptaq": ({"kind": "gptaq"},),
    "awq": ({"kind": "awq"}, {"kind": "gptq"}),
    "autoround": ({"kind": "autoround", "iters": 5},),
    "hqq": ({"kind": "hqq"},),
    "rtn": ({"kind": "rtn"},),
    "w4a8": ({"kind": "rtn", "activations": "int8_token"},),
}


def rows_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Bits and group size of every matrix."""
    rows = [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()]
    return {row["name"].removeprefix("model.layers."): (row["bits"], row["group_size"]) for row in rows}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}


def ruled(steps: tuple[dict, ...], *rules: dict, **options) -> list[dict]:
    return [*steps[:-1], {**steps[-1], "bits": 4, "group_size": 32, **options, "rules": list(rules)}]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in ("awq", "rtn") else pytest.mark.slow) for one in QUANTIZERS]
)
def test_each_matrix_is_stored_as_the_first_rule_says(name: str, family_folder, compress) -> None:
    pytest.importorskip("compressed_tensors")
    steps = ruled(QUANTIZERS[name], FIRST, {"match": "self_attn", "group_size": 0}, DOWN)
    made = compress(family_folder("qwen2"), *steps)
    attention, own = (4, 0), (6, 16)
    expected = {
        "mixer.qkv": attention,
        "mixer.out": attention,
        "feed_forward.gate_up": (4, 32),
        "feed_forward.down": (8, 32),
    }
    wanted = {f"{index}.{path}": one for index in (0, 1) for path, one in expected.items()} | {"0.mixer.qkv": own}
    assert rows_of(made.folder) == wanted
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    block = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    stored = {(one["weights"]["num_bits"], one["weights"]["group_size"]) for one in block["config_groups"].values()}
    assert stored == {(6, 16), (4, None), (8, 32), (4, 32)}
    with torch.no_grad():
        lost = load(made.folder)(TOKENS) - transformers_logits(made.folder, TOKENS)
    if name == "w4a8":  # inputs on the border between two codes may fall on either side after sums in another order
        assert lost.norm() <= 0.1 * load(made.folder)(TOKENS).norm()
    else:
        assert lost.abs().max() <= 1e-5
    step = made.techniques[-1]
    assert [rule["match"] for rule in step["rules"]] == [FIRST["match"], "self_attn", DOWN["match"]]


@pytest.mark.parametrize("name", ["awq", pytest.param("gptaq", marks=pytest.mark.slow)])
def test_a_rule_for_all_is_the_quantizer_with_its_options(name: str, family_folder, compress) -> None:
    """Also in the search of awq, which rounds with the quantizer of each matrix."""
    source = family_folder("llama")
    made = compress(source, *ruled(QUANTIZERS[name], {"match": "layers", "bits": 3, "group_size": 16}))
    plain = compress(source, *ruled(QUANTIZERS[name], bits=3, group_size=16), name="plain")
    before, after = tensors_of(plain.folder), tensors_of(made.folder)
    assert before.keys() == after.keys() and all(torch.equal(one, after[key]) for key, one in before.items())


def test_an_interrupted_run_reads_each_layer_with_its_own_bits(family_folder, compress) -> None:
    source, steps = family_folder("llama"), ruled(QUANTIZERS["gptq"], FIRST, DOWN)
    whole = compress(source, *steps, name="whole")
    with stopped_before(1):
        compress(source, *steps, name="resumed")
    before, after = tensors_of(whole.folder), tensors_of(compress(source, *steps, name="resumed").folder)
    assert all(torch.equal(one, after[name]) for name, one in before.items())


def test_the_gptq_layout_names_them_in_dynamic_for_gptqmodel_and_vllm(family_folder, compress) -> None:
    """GPTQModel looks up a module's name, vLLM that of the linear into which it fuses it; the first pattern that matches holds."""
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    rules = (FIRST | {"bits": 8, "group_size": 64}, DOWN)
    made = compress(family_folder("llama", **sizes), *ruled(QUANTIZERS["rtn"], *rules, layout="gptq"))
    assert made.figures["model_bytes"].value == made.figures["model_bytes"].estimate.value
    block = json.loads((made.folder / "config.json").read_text())["quantization_config"]

    def looked_up(name: str) -> tuple[int, int]:
        found = next((one for key, one in block["dynamic"].items() if re.match(key.removeprefix("+:"), name)), {})
        return found.get("bits", block["bits"]), found.get("group_size", block["group_size"])

    for last in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        assert looked_up(f"model.layers.0.self_attn.{last}") == (8, 64)
        assert looked_up(f"model.layers.1.self_attn.{last}") == (4, 32)
    assert looked_up("model.layers.1.mlp.down_proj") == (8, 32)
    assert looked_up("model.layers.1.mlp.gate_up_proj") == (4, 32)
    packed = compress(
        family_folder("llama", **sizes), *ruled(QUANTIZERS["rtn"], *rules, scale_dtype="float16"), name="packed"
    )
    with torch.no_grad():
        assert (load(made.folder)(TOKENS) - load(packed.folder)(TOKENS)).abs().max() <= 1e-5


def test_the_server_computes_with_them(family_folder, compress) -> None:
    made = compress(family_folder("llama"), *ruled(QUANTIZERS["rtn"], FIRST, DOWN))
    must_serve_what_it_computes(made.folder)


@pytest.mark.parametrize(
    ("rules", "options", "what", "fix"),
    [
        ([{"match": "re:.*down_prj", "bits": 8}], {}, "rules.0: 're:.*down_prj' matches none", "model.layers.0.mlp.down_proj"),
        ([DOWN], {"ignore": ["lm_head", "down_proj"]}, "matches none of the linears that are quantized", "model.layers.0."),
        ([DOWN, DOWN | {"match": r"layers\.0\.mlp\.down_proj"}], {}, "rules.1: .* is never used", "before the more general"),
        ([{"match": "v_proj", "bits": 8}], {}, "q_proj as the others, .*v_proj bits=8", r"re:.*(q_proj|k_proj|v_proj)"),
        ([{"match": "down_proj"}], {}, "bits, group_size or both", "rules.0"),
        ([{"match": "down_proj", "bits": 9}], {}, "less than or equal to 8", "rules.0.bits"),
        ([{"match": "re:*", "bits": 8}], {}, "not a regular expression", "rules.0.match"),
        ([{"match": "down_proj", "group_size": 40}], {}, "group_size 40 does not divide the 96 .*feed_forward.down", "48"),
        ([DOWN], {"layout": "awq"}, "int weights of 8 bits, strategy group, in awq, at layers.0.feed", "layout=pack-quantized"),
        ([DOWN | {"bits": 5}], {"layout": "gptq"}, "weights of 5 bits, strategy group, in gptq", "layout=pack-quantized"),
        ([{"match": "mlp", "group_size": 96, "bits": None}], {"layout": "awq", "uneven": "nearest"}, "awq stores all", "pack-quantized"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_error(rules, options, what, fix, family_folder, compress) -> None:
    spec = {key: options[key] for key in options if key == "ignore"}
    step = {"kind": "rtn", "group_size": 32, "rules": rules} | {key: options[key] for key in options if key != "ignore"}
    with pytest.raises(SpecError, match=what) as caught:
        compress(family_folder("llama"), step, **spec)
    assert fix in caught.value.fix


def test_rules_and_an_allocation_are_an_error() -> None:
    steps = [{"kind": "gptq", "rules": [DOWN]}]
    with pytest.raises(SpecError, match="chooses the bits of every matrix") as caught:
        Compress.read({"steps": steps, "allocation": {"kind": "kl", "bits_per_weight": 4.5}})
    assert "ignore" in caught.value.fix


def test_the_plan_says_what_each_rule_gives(family_folder) -> None:
    facts = CheckpointFacts.of(family_folder("llama"))
    plan = Compress.read({"steps": ruled(QUANTIZERS["rtn"], FIRST, DOWN)}).plan({"model": facts}, describe())
    assert plan.notes == (
        f"rule {FIRST['match']}: bits=6, group_size=16 for 1 of 8 matrices",
        f"rule {DOWN['match']}: bits=8 for 2 of 8 matrices",
    )
