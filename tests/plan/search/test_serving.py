"""The serving part of a search: formats, latency and rates, quality that nobody measured, and chains."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.cost.serve.schedule import StepKind
from hone.plan.search.exact import simulated
from hone.plan.search.goal import Goal
from hone.plan.search.limits import Tally
from hone.plan.search.machines import fleet_of
from hone.plan.search.quality import Known, key_of, measured_losses, trained_loss
from hone.plan.search.searching import limits_of, search
from hone.plan.search.serving.formats import FORMATS, formats_of
from hone.plan.search.serving.mixed import mixed_formats
from hone.plan.search.serving.space import Servings, best
from hone.plan.search.shapes import candidates_of

MODEL = {
    "hidden_size": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "intermediate_size": 2816,
    "max_seq_len": 4096, "tie_embeddings": False,
}  # fmt: skip
GOAL = {
    "goal": "compress+serve", "model": MODEL, "vocab_size": 4096, "machines": ["2xH100"], "price_per_hour": 2.0,
    "requests": {"prompt_tokens": 512, "output_tokens": 128, "tokens": "1B"},
    "space": {"formats": ["16 bit", "fp8", "int4 g128"], "max_num_seqs": [1, 16, 64, 256], "max_num_batched_tokens": [2048]},
}  # fmt: skip


def servings(**more) -> Servings:
    goal = Goal.read({**GOAL, **more})
    (candidate,) = candidates_of(goal)
    return Servings(goal, candidate, fleet_of(goal.machines[0], goal), {})


def test_a_step_costs_what_the_engine_says_and_prompts_add_to_it():
    of = servings()
    axes = of.product.axes
    serving, _, token_bytes = of._opened(0, 0, 0)
    assert token_bytes == 2 * 2 * 4 * 128 * 4  # bytes, keys and values, heads, width, layers
    (tpot,), (ttft,), (rate,), _ = of.costs(*(np.array([place]) for place in (0, 0, 0, 0, axes["seqs"].index(16))))
    decode = serving.step_seconds(StepKind(16, 512 + 64, (), 16, 1)).value
    prefill = serving.step_seconds(StepKind(0, 0.0, ((0, 512),), 1, 1), again=True).value
    # As many prompts as a step of 2,048 tokens holds.
    four = serving.step_seconds(StepKind(0, 0.0, ((0, 512),) * 4, 4, 1), again=True).value
    assert tpot == pytest.approx(decode + 16 / 128 * four / 4) and ttft == pytest.approx(prefill + decode)
    assert rate == pytest.approx(16 / tpot)


def test_more_sequences_are_more_tokens_and_longer_steps():
    of = servings()
    places = np.arange(4)
    tpot, _, rate, num_bytes = of.costs(*(np.zeros(4, int) for _ in range(4)), places)
    assert (np.diff(tpot) > 0).all() and (np.diff(rate) > 0).all() and (np.diff(num_bytes) > 0).all()
    (int4,) = (place for place, one in enumerate(of.product.axes["format"]) if one.name == "int4 g128")
    fewer = of.costs(np.full(4, int4), *(np.zeros(4, int) for _ in range(3)), places)
    assert (fewer[3] < num_bytes).all() and fewer[0][0] < tpot[0]


def test_closed_forms_are_near_the_steps_of_the_scheduler():
    """A steady state against a run of requests played step by step: within 20 %, the run has a beginning and an end."""
    of = servings()
    ways = best(of, Tally(limits_of(of.goal)))
    some = [way for way in ways if way.engine["max_num_seqs"] in (16, 64)]
    assert some
    for way in some[:4]:
        assert simulated(way, of.goal).tokens_per_s == pytest.approx(way.tokens_per_s, rel=0.2), way.label()


def test_the_target_decides_which_formats_are_tried():
    tried = {}
    for target in ("intel-vnni", "nvidia-hopper", "apple", "qualcomm"):
        goal = Goal.read({**GOAL, "target": target, "space": {}})
        tried[target] = {one.name for one in formats_of(goal, fleet_of("1xH100", goal))}
    assert "fp8" in tried["nvidia-hopper"] and not {"fp8", "nvfp4"} & tried["intel-vnni"]
    assert "int8" in tried["intel-vnni"] & tried["qualcomm"] and "int4 g128" in tried["apple"]
    assert all("int3 g128" not in names for names in tried.values())
    assert [
        one.name for one in formats_of(Goal.read({**GOAL, "goal": "serve"}), fleet_of("1xH100", Goal.read(GOAL)))
    ] == ["16 bit"]
    own = Goal.read({**GOAL, "target": None, "space": {}})
    assert "nvfp4" in {one.name for one in formats_of(own, fleet_of("1xB200", own))}
    assert not {"fp8", "nvfp4", "mxfp4"} & {one.name for one in formats_of(own, fleet_of("1xV100", own))}
    with pytest.raises(SpecError, match="did you mean 'int4 g128'"):
        formats_of(Goal.read({**GOAL, "space": {"formats": ["int4 g127"]}}), fleet_of("1xH100", Goal.read(GOAL)))


def test_unmeasured_quality_is_unknown_and_keeps_no_limit():
    found = search(Goal.read(GOAL), most=6)
    known = {way.format.name: way.quality for way in found.ways if way.engine["kv_cache_dtype"] == "auto"}
    assert known["16 bit"].value == 0.0 and known.get("int4 g128") is None
    assert len({way.format.name for way in found.ways}) > 1, "formats of unknown quality do not beat each other"
    limited = search(Goal.read({**GOAL, "quality": {"max_increase": 0.05}}), most=4)
    assert {way.format.name for way in limited.ways} == {"16 bit"}
    assert limited.tally.rejected["breaks the limit of loss of compression"] > 0


def test_a_measured_quality_counts(tmp_path):
    folder = tmp_path / "int4"
    folder.mkdir()
    steps = [{"kind": "gptq", "bits": 4, "group_size": 128, "uneven": "nearest", "dampening": 0.01}]
    figure = {
        "name": "kl_to_dense",
        "value": 0.021,
        "unit": "nats/token",
        "how": "measured",
        "n": 1,
        "ci95": 0.002,
        "estimate": None,
        "note": "",
    }
    manifest = {
        "format": 1, "kind": "compress", "name": "int4", "fingerprint": "f", "spec": {"steps": steps}, "figures": [figure],
        "files": {}, "parents": [], "techniques": [],
    }  # fmt: skip
    (folder / "hone.json").write_text(json.dumps(manifest))
    found = measured_losses([str(folder)])
    assert found[key_of(FORMATS["int4 g128"].steps)] == Known(0.021, 0.002, f"measured in {folder}")
    goal = Goal.read({**GOAL, "quality": {"max_increase": 0.05}, "measured": [str(folder)]})
    ways = search(goal, most=6).ways
    assert {way.format.name for way in ways} == {"16 bit", "int4 g128"}
    assert Artifact.read(folder).kind == "compress"
    manifest["figures"] = []
    (folder / "hone.json").write_text(json.dumps(manifest))
    with pytest.raises(SpecError, match="does not say what a compression costs"):
        measured_losses([str(folder)])


def test_an_impossible_latency_says_what_it_would_have_to_be():
    goal = Goal.read({**GOAL, "requests": {**GOAL["requests"], "tpot_s": 1e-5}})
    found = search(goal)
    assert not found.ways and found.relaxed[0].names == ("tpot",) and found.relaxed[0].way is not None
    assert "tpot" in found.relaxed[0].said and "->" in found.relaxed[0].said


def test_a_chain_adds_up_its_stages():
    fields = {
        **GOAL, "goal": "train+compress+serve", "tokens": ["1B"], "batch_size": [64], "seq_len": 2048, "machines": ["8xH100"],
        "space": {**GOAL["space"], "tensor_parallel": [1], "pipeline_parallel": [1], "precision": ["bf16"]},
    }  # fmt: skip
    found = search(Goal.read(fields), most=3)
    way = found.chosen
    assert way.train is not None and way.engine is not None and way.format is not None
    assert way.axes()["dollars"] == pytest.approx(8 * 2 * (way.train_hours + way.compress_hours + way.serve_hours))
    assert way.axes()["hours"] == pytest.approx(way.train_hours + way.compress_hours)
    stages = [entry["stage"] for entry in way.recipe(found.goal, "x")["stages"]]
    assert stages == ["data", "train", *(["compress"] if way.format.steps else []), "serve"]
    tight = search(Goal.read({**fields, "budget": 0.9 * way.axes()["dollars"] / 100}), most=1)
    assert not tight.ways and any("budget" in one.names for one in tight.relaxed)


def test_a_scaling_law_has_the_spread_of_its_fits():
    """Chinchilla's own model of 70 billion weights and 1.4 trillion tokens: a loss of 1.94 by table A3."""
    found = trained_loss(70e9, 1.4e12)
    assert found.value == pytest.approx(1.95, abs=0.05) and 0.005 < found.half < 0.1
    assert trained_loss(1e9, 1e12).value < trained_loss(1e9, 1e11).value


def test_a_machine_is_named_in_any_case():
    goal = Goal.read({**GOAL, "price_per_hour": {"H100": 2.0}})
    lower, usual = (fleet_of(text, goal) for text in ("2xh100", "2xH100"))
    assert lower == usual and lower.price_per_hour == 2.0


def front_folder(folder, losses: list[list[float]], *, kl: float) -> None:
    """An artifact of a compression that measured what each matrix loses with 4 and 8 bits; its own choice lost half of `kl` by the sum."""
    folder.mkdir()
    rows = {f"{place}.x": {"weights": 1000, "bytes": [520, 1020], "losses": one} for place, one in enumerate(losses)}
    allocation = {"kind": "hessian", "bits": [4, 8], "max_kl": 1.0, "num_sequences": 7}
    kept = {"allocation": allocation, "loss": kl / 2, "matrices": rows}
    (folder / "sensitivities.json").write_text(json.dumps(kept))
    figure = {
        "name": "kl_to_dense", "value": kl, "unit": "nats/token", "how": "measured", "n": 1, "ci95": None, "estimate": None, "note": "",
    }  # fmt: skip
    spec = {"steps": [{"kind": "gptq", "bits": 4, "group_size": 64}], "allocation": allocation}
    manifest = {
        "format": 1, "kind": "compress", "name": "front", "fingerprint": "f", "spec": spec, "figures": [figure],
        "files": {}, "parents": [], "techniques": [],
    }  # fmt: skip
    (folder / "hone.json").write_text(json.dumps(manifest))


def test_points_of_a_measured_front_are_formats(tmp_path):
    """Against every choice of bits of eight matrices; the share of losses is the model's own, two, above that of other models."""
    losses = [[float(high), float(high) / 50] for high in np.random.default_rng(0).uniform(0.001, 0.02, 8)]
    front_folder(tmp_path / "front", losses, kl=0.05)
    goal = Goal.read({**GOAL, "quality": {"max_increase": 0.06}, "measured": [str(tmp_path / "front")], "space": {}})
    found = mixed_formats(goal)
    assert len(found) > 2 and len({one.name for one in found}) == len(found)
    picks = list(itertools.product((0, 1), repeat=8))
    for one, bound in zip(found, (0.06, 0.03, 0.015), strict=False):
        fits = [pick for pick in picks if 2 * sum(row[at] for row, at in zip(losses, pick, strict=True)) <= bound]
        fewest = min(520 * 8 + 500 * sum(pick) for pick in fits)
        assert one.bits == pytest.approx(8 * fewest / 8000, abs=1e-4) and 0 < one.quality.value <= bound
        assert one.allocation == {"kind": "hessian", "bits": [4, 8], "num_sequences": 7, "bits_per_weight": one.bits}
    assert {one.name for one in found} <= {one.name for one in formats_of(goal, fleet_of("1xH100", goal), found)}
    slow = replace(found[0], allocation={**found[0].allocation, "bits": [3, 8]})
    assert slow not in formats_of(goal, fleet_of("1xH100", goal), (slow,)), "3 bits gain nothing there"
    strict = goal.model_copy(update={"quality": goal.quality.model_copy(update={"max_increase": 1e-5})})
    assert mixed_formats(strict) == (), "what was measured says that no choice loses so little"
    kept = json.loads((tmp_path / "front/sensitivities.json").read_text())
    del kept["matrices"]["0.x"]["losses"]
    for wrong in ({}, kept):
        (tmp_path / "front/sensitivities.json").write_text(json.dumps(wrong))
        with pytest.raises(SpecError, match="does not say what matrices lose"):
            mixed_formats(goal)


def test_a_limit_of_quality_can_be_met_before_anything_is_measured():
    """By a choice of bits within it: the recipe says so, the compress stage reads it, and bytes are those of the most bits."""
    goal = Goal.read(
        {**GOAL, "quality": {"max_increase": 0.05}, "space": {**GOAL["space"], "formats": ["int8", "mixed"]}}
    )
    found = search(goal, most=4)
    ways = [way for way in found.ways if way.format.allocation and way.engine["kv_cache_dtype"] == "auto"]
    assert ways and all(way.quality.value == 0.05 for way in ways)
    (stage,) = (one for one in ways[0].recipe(goal, "x")["stages"] if one["stage"] == "compress")
    assert stage["allocation"] == {"kind": "hessian", "bits": [4, 8], "max_kl": 0.05}
    of = servings()
    eight, mixed = (of.compressed(one) for one in (FORMATS["int8"], ways[0].format))
    assert mixed.weights_bytes == pytest.approx(eight.weights_bytes, rel=0.03)
    assert mixed_formats(Goal.read(GOAL)) == ()
