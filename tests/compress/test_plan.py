"""Plans of a compress stage: from facts alone, exact in bytes, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.base.artifact import Artifact
from hone.base.errors import FitError, SpecError
from hone.base.plan import DISK, MEMORY
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.feed.facts import DataFacts
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts

STEPS = {
    "int4": [{"kind": "rtn", "bits": 4, "group_size": 32}],
    "int8": [{"kind": "rtn", "bits": 8, "group_size": 0}],
    "mixed groups": [{"kind": "rtn", "bits": 4, "group_size": 64, "uneven": "nearest"}],
    "pruned": [{"kind": "magnitude", "sparsity": 0.3}],
}
DATA = DataFacts(
    where="data-text", splits={"train": {"tokens": 9000, "documents": 9, "bytes": 30000}}, vocab_size=320,
    eos_token_id=0, tokenizer=None,
)  # fmt: skip


def planned(facts: CheckpointFacts) -> CheckpointFacts:
    """The same model before it exists."""
    return facts.model_copy(update={"where": "train-base"})


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("rest_dtype", ["keep", "float16"])
def test_a_model_that_does_not_exist_is_planned_to_the_byte(
    name: str, rest_dtype: str, tiny_llama: Path, compress
) -> None:
    options = {"rest_dtype": rest_dtype}
    facts, spec = CheckpointFacts.of(tiny_llama), Compress.read({"steps": STEPS[name], **options})
    before, there = (spec.plan({"model": one}, describe()) for one in (planned(facts), facts))
    made = compress(tiny_llama, *STEPS[name], **options)
    size = sum(path.stat().st_size for path in made.folder.glob("*.safetensors"))
    assert before.estimates["model_bytes"].value == there.estimates["model_bytes"].value == size
    assert before.facts.weights_bytes == size
    found = CheckpointFacts.of(made.folder)
    assert before.facts == found.model_copy(update={"where": before.facts.where})
    assert made.figures["disk_bytes"].value == pytest.approx(before.estimates[DISK].value, abs=1.2e6)
    if name == "pruned":
        assert before.estimates["sparsity"].value == 0.3


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "phi3", "olmo2", "gemma2"]
)  # tied; biases, untied; norms of queries and keys; fused modules; norms after blocks, and around them
def test_a_config_names_every_tensor_of_its_checkpoint(family: str, family_folder) -> None:
    from hone.compress.sizes import entries

    facts = CheckpointFacts.of(family_folder(family))
    assert entries(planned(facts)) == entries(facts)


def test_chains_of_stages_are_planned_from_what_the_stage_before_says(tiny_llama: Path) -> None:
    spec = Compress.read({"steps": STEPS["int4"]})
    first = spec.plan({"model": planned(CheckpointFacts.of(tiny_llama))}, describe())
    assert first.facts.given == frozenset({"weights:quantized"})
    with pytest.raises(SpecError, match="quantized already"):
        spec.plan({"model": first.facts}, describe())
    pruned = Compress.read({"steps": STEPS["pruned"]}).plan({"model": CheckpointFacts.of(tiny_llama)}, describe())
    assert spec.plan({"model": pruned.facts}, describe()).estimates["model_bytes"] == first.estimates["model_bytes"]


def test_calibration_is_planned_from_the_facts_of_the_data(tiny_llama: Path, tmp_path: Path) -> None:
    spec = Compress.read(
        {"steps": [{"kind": "gptq", "bits": 4, "group_size": 32}], "num_sequences": 64, "seq_len": 256}
    )
    model = planned(CheckpointFacts.of(tiny_llama))
    plan = spec.plan({"model": model, "data": DATA}, describe())
    assert plan.calibrated[:2] == (36, 256)  # 9000 tokens
    other = DATA.model_copy(update={"tokenizer": "of another model"})
    with pytest.raises(SpecError, match="another tokenizer"):
        spec.plan({"model": model, "data": other}, describe())
    with pytest.raises(SpecError, match="gptq needs hessian"):
        spec.plan({"model": model}, describe())


def test_hidden_states_of_both_models_are_planned_where_a_step_compares_them(tiny_llama: Path) -> None:
    model, found = CheckpointFacts.of(tiny_llama), {}
    for kind in ("gptq", "gptaq"):
        spec = Compress.read({"steps": [{"kind": kind, "group_size": 32}], "num_sequences": 64, "seq_len": 256})
        formula = spec.plan({"model": model, "data": DATA}, describe()).estimates[MEMORY].formula
        found[kind] = formula.partition("hidden states ")[2].partition(" + ")[0]
    assert found == {"gptq": "2.2 MiB", "gptaq": "4.5 MiB"}  # 36 x 256 tokens, 64 wide, float32
    with pytest.raises(SpecError, match="gptaq needs cross"):
        Compress.read({"steps": [{"kind": "gptaq", "group_size": 32}]}).plan({"model": model}, describe())


def test_what_does_not_fit_is_said_with_three_ways_out(tiny_llama: Path) -> None:
    spec = Compress.read({"steps": STEPS["int4"], "num_sequences": 64, "seq_len": 256})
    plan = spec.plan({"model": CheckpointFacts.of(tiny_llama), "data": DATA}, describe())
    size = plan.estimates[DISK].value
    assert not plan.shortages({DISK: size, MEMORY: 1e12})
    (short,) = plan.shortages({DISK: size - 1, MEMORY: 1e12})
    assert short.name == DISK and len(short.ways) == 3
    with pytest.raises(FitError, match="of memory"):
        plan.must_fit({MEMORY: 1e3}, "compress-x")


def test_a_refused_command_leaves_no_folder(tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("the quick")
    for values in (
        {"steps": [{"kind": "rtn", "bits": 4, "group_size": 24}]},
        {"steps": [{"kind": "gptq", "group_size": 32}], "calibration_text": str(text)},
    ):
        with pytest.raises(SpecError):
            Compress.read(values).make(tmp_path / "compress-x", {"model": Artifact.read(tiny_llama)}, Run(quiet=True))
        assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


@pytest.mark.slow
def test_every_error_says_what_it_is_of(tiny_llama: Path, compress, calibration_text: Path) -> None:
    step = {"kind": "rtn", "bits": 4, "group_size": 32}
    blind, seen = (
        compress(tiny_llama, step),
        compress(tiny_llama, step, name="seen", calibration_text=str(calibration_text)),
    )
    assert blind.figures["relative_output_error"].value is None
    assert "no calibration inputs" in blind.figures["relative_output_error"].note
    assert (
        seen.figures["relative_output_error"].value > 0
        and "calibration inputs" in seen.figures["relative_output_error"].note
    )
    assert blind.figures["relative_weight_error"].value == seen.figures["relative_weight_error"].value
    assert "in float32" in blind.figures["compression_ratio"].note
    rows = [json.loads(line) for line in (seen.folder / "layers.jsonl").read_text().splitlines()]
    assert all(row["error"] > 0 and row["weight_error"] > 0 for row in rows)
