"""--fit and --target_latency: the first option within the budget is taken, with reasons; budgets that cannot be kept; misuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.base.errors import DriftError, FitError, SpecError
from hone.compress.engine.running import _keep
from hone.compress.stage import Compress
from hone.measure.machine import Machine, describe
from hone.model.facts import CheckpointFacts
from hone.model.folder import weights_bytes
from hone.plan import fitting


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model of which most bytes are in linears that groups of 128 divide."""
    import torch

    from hone.model.decoder import build
    from hone.model.hf import save
    from hone.model.shape import Shape
    from tests.conftest import byte_tokenizer

    tokenizer = byte_tokenizer()
    shape = Shape(hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=512, max_seq_len=128)
    folder = tmp_path_factory.mktemp("roomy")
    save(build(shape.config(len(tokenizer)), dtype=torch.bfloat16), folder)
    tokenizer.save_pretrained(folder)
    return folder


def budget(folder: Path, share: float) -> str:
    return str(int(share * weights_bytes(folder)))


def test_each_budget_takes_the_best_option_that_fits(roomy: Path, compress, calibration_text: Path) -> None:
    """The folder keeps the budget; the steps, the reasons and the predicted divergence are recorded."""
    expected = {0.75: ["rtn"], 0.45: ["gptq", "kl"], 0.24: ["gptq", "kl"]}
    for share, kinds in expected.items():
        made = compress(roomy, fit=budget(roomy, share), calibration_text=str(calibration_text), name=str(share))
        assert weights_bytes(made.folder) <= share * weights_bytes(roomy)
        assert [one["kind"] for one in made.techniques] == kinds
        kl = made.figures["kl_to_dense"]
        predicted = kl.estimate is not None and kl.estimate.value > 0
        assert kl.value > 0 and predicted == (len(kinds) > 1), "of this model, never another's"
    bits = {json.loads(line)["bits"] for line in (made.folder / "layers.jsonl").read_text().splitlines()}
    assert bits <= {2, 3, 4} and len(bits) > 1


def test_the_fewest_bytes_within_a_divergence(roomy: Path, compress, calibration_text: Path) -> None:
    """More may be lost, fewer bytes; what is predicted stays within the limit, and a size beside it is kept."""
    sizes, fields = [], {"calibration_text": str(calibration_text), "seq_len": 32}
    for most in (0.002, 0.05):
        made = compress(roomy, max_kl=most, name=f"kl-{most}", **fields)
        predicted = made.figures["kl_to_dense"].estimate.value
        assert 0 < predicted <= most and [one["kind"] for one in made.techniques] == ["gptq", "kl"]
        assert weights_bytes(made.folder) <= made.figures["model_bytes"].estimate.value
        sizes.append(weights_bytes(made.folder))
    assert sizes[1] < sizes[0] < weights_bytes(roomy)
    with pytest.raises(FitError, match="more than the"):
        compress(roomy, max_kl=2e-5, fit=budget(roomy, 0.24), name="both", **fields)
    with pytest.raises(FitError, match=r"predicted to lose at most 1e-09 nats a token: the most bits lose up to"):
        compress(roomy, max_kl=1e-9, name="none", **fields)


def test_a_divergence_without_calibration_is_quoted(roomy: Path) -> None:
    facts = {"model": CheckpointFacts.of(roomy)}
    for most, bits in ((0.05, 4), (0.001, 8)):
        plan = Compress.read({"max_kl": most}).priced(facts, describe())
        assert plan.chosen.steps[0].bits == bits and plan.chosen.max_kl is None, plan.notes
        assert "loses more than" in "".join(plan.notes) and plan.notes[-1].startswith("* of another model, quoted from")
    with pytest.raises(FitError, match="1e-06 nats a token"):
        Compress.read({"max_kl": 1e-6}).priced(facts, describe())


def test_the_plan_says_why(roomy: Path, calibration_text: Path) -> None:
    fields = {"fit": budget(roomy, 0.45), "calibration_text": str(calibration_text), "seq_len": 32}
    plan = Compress.read(fields).priced({"model": CheckpointFacts.of(roomy)}, describe())
    assert [line.split("  ")[0].split(" (b")[0] for line in plan.notes[:-1]] == [
        "as it is", "int8, a scale per row", "int4 and int8 gptq, by sensitivity", "int4 gptq, groups of 128",
        "int2 to int4 gptq, by sensitivity", "int3 gptq, groups of 128",
    ]  # fmt: skip
    assert "larger than" in plan.notes[0] and "larger than" in plan.notes[1] and plan.notes[2].endswith("chosen")
    assert plan.notes[3].endswith("not needed: a better one fits")
    assert plan.chosen.steps[0].kind == "gptq" and plan.chosen.fit is None
    assert "KL 0.0174*" in plan.notes[3] and "KL" not in plan.notes[2] and "kl_to_dense" not in plan.estimates
    assert (
        "quoted from a 29 M model (hone's reference-29m), 65,520 tokens, mean of 3 calibration seeds, 2026-"
        in plan.notes[-1]
    )
    assert "quality.jsonl" in plan.notes[-1] and str(roomy) in plan.notes[-1] and "is measured" in plan.notes[-1]


def test_without_memory_for_the_whole_model_all_matrices_get_the_same_bits(
    roomy: Path, calibration_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "free_memory_bytes", property(lambda _: 1.0))
    fields = {"fit": budget(roomy, 0.27), "calibration_text": str(calibration_text), "seq_len": 32}
    plan = Compress.read(fields).priced({"model": CheckpointFacts.of(roomy)}, describe())
    assert plan.chosen.steps[0].bits == 3 and plan.chosen.allocation is None
    assert any("of memory: it measures the whole model" in line for line in plan.notes)


def test_without_calibration_weights_are_rounded(roomy: Path) -> None:
    plan = Compress.read({"fit": budget(roomy, 0.45)}).priced({"model": CheckpointFacts.of(roomy)}, describe())
    (step,) = plan.chosen.steps
    assert (step.kind, step.bits, step.scale) == ("rtn", 4, "search") and plan.chosen.allocation is None


def test_latency_is_that_of_the_serving_plan(roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, machine = {"model": CheckpointFacts.of(roomy)}, describe()
    times = {"as it is": 10.0, "int8, a scale per row": 6.0, "int4 rtn, groups of 128": 3.0}
    plain = fitting._tried

    def timed(name: str, *rest):
        one = plain(name, *rest[:-1], float("inf"))
        late = "slower" if times.get(name, 1.0) > rest[-1] * 1e3 else ""
        return one._replace(latency_s=times.get(name, 1.0) / 1e3, wrong=one.wrong or late)

    monkeypatch.setattr(fitting, "_tried", timed)
    plan = Compress.read({"target_latency": "7ms"}).priced(facts, machine)
    assert plan.chosen.steps[0].bits == 8
    plan = Compress.read({"target_latency": "4ms"}).priced(facts, machine)
    assert plan.chosen.steps[0].bits == 4


def test_a_run_that_resumes_takes_the_steps_it_had_chosen(roomy: Path, tmp_path: Path) -> None:
    plans = [
        Compress.read({"fit": budget(roomy, share)}).priced({"model": CheckpointFacts.of(roomy)}, describe())
        for share in (0.75, 0.45)
    ]
    _keep(plans[0].chosen, tmp_path)
    _keep(plans[0].chosen, tmp_path)
    with pytest.raises(DriftError, match=r"had chosen .*rtn.*8"):
        _keep(plans[1].chosen, tmp_path)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"fit": "6 gigs"}, SpecError, "is no size"),
        ({"target_latency": "fast"}, SpecError, "is no time"),
        ({"fit": "1GB", "steps": [{"kind": "rtn"}]}, SpecError, "one of the two"),
        ({}, SpecError, "give steps, or fit"),
        ({"max_kl": 0.1, "steps": [{"kind": "rtn"}]}, SpecError, "one of the two"),
        ({"fit": "1GB", "allocation": {"kind": "kl", "bits_per_weight": 4}}, SpecError, "leave it out"),
        ({"fit": "1GB"}, SpecError, "as it is, within 1GB"),
        ({"fit": "10KB"}, FitError, "no compression of"),
    ],
)
def test_misuse_and_impossible_budgets_are_named(fields: dict, error: type, words: str, roomy: Path) -> None:
    with pytest.raises(error, match=words):
        Compress.read(fields).priced({"model": CheckpointFacts.of(roomy)}, describe())
