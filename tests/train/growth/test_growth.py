"""Trainings that begin with a grown model: its loss, its figures, its plan, its bytes after a kill, and on several ranks."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.measure.machine import describe
from hone.model.hf import Checkpoint, load
from hone.train.loop import Trainer
from hone.train.stage import Train
from tests.train.conftest import SHAPE, STEADY
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.ranks import made_in_turn

SPEC = {
    "model": SHAPE.model_dump(),
    "batch_size": 4,
    "seq_len": 32,
    "steps": 8,
    "validation": {"sequences": 8},
    "optimizer": {"lr": 3e-3},
}
WIDE = {"kind": "net2net", "hidden_size": 96, "num_heads": 8, "intermediate_size": 128}
GROWN = {**SPEC, "steps": 4, "init": WIDE}
QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def small(data_folder, tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("line")
    return Train.read(SPEC).make(folder / "train-small", {"data": Artifact.read(data_folder)}, QUIET)


@pytest.fixture(scope="module")
def grown(small, data_folder, tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("line")
    return Train.read(GROWN).make(folder / "train-large", {"data": Artifact.read(data_folder), "model": small}, QUIET)


def test_the_loss_is_the_same_before_and_after_growth(small, grown):
    figures = grown.figures
    assert abs(figures["loss_after_growth"].value - figures["loss_before_growth"].value) <= 1e-5
    assert figures["loss_before_growth"].value == pytest.approx(small.figures["val_loss"].value, abs=1e-6)
    assert figures["val_loss"].value < figures["loss_after_growth"].value
    config = transformers.AutoModelForCausalLM.from_pretrained(grown.folder).config
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (96, 8, 4)
    assert config.head_dim == 12 and config.intermediate_size == 128


def test_flops_of_both_phases(small, grown):
    """Of weights in products and of causal attention, by hand."""
    flops = {}
    for artifact in (small, grown):
        config = Checkpoint(artifact.folder).config
        weights = sum(one.num_params for index in range(4) for one in config.linears(index).values())
        heads = config.layers[0].mixer.num_heads * config.layers[0].mixer.head_dim
        weights += config.vocab_size * config.hidden_size
        flops[artifact] = 6 * weights + 3 * 4 * 4 * heads * (32 + 1) / 2
    figures = grown.figures
    tokens = small.figures["train_tokens"].value, figures["train_tokens"].value
    # The plan of a finished training counts its positions without the exact padding of the sequences that it read.
    assert figures["flops_before_growth"].value == pytest.approx(flops[small] * tokens[0], rel=0.02)
    assert figures["train_flops"].value == pytest.approx(flops[grown] * tokens[1], rel=1e-9)
    assert figures["total_flops"].value == figures["train_flops"].value + figures["flops_before_growth"].value
    saved = (flops[grown] - flops[small]) * tokens[0]
    assert figures["flops_saved"].value == pytest.approx(saved, rel=0.02) and saved > 0
    for name in ("train_flops", "flops_before_growth", "total_flops", "flops_saved"):
        assert figures[name].error == pytest.approx(0, abs=0.02)


def test_the_plan_says_what_growth_saves(small, grown, data_folder):
    facts = {"data": facts_of(Artifact.read(data_folder)), "model": facts_of(small)}
    plan = Train.read({**GROWN, "init": "stack"}).plan(facts, describe("cpu"))
    assert plan.facts.config.num_layers == 8
    (note,) = [note for note in plan.notes if "grown by stack" in note]
    assert "its logits change" in note and "FLOPs before" in note
    again = {"data": facts["data"], "model": plan.facts.model_copy(update={"where": "train-planned"})}
    more = Train.read({**GROWN, "init": "block_expansion"}).plan(again, describe("cpu"))
    assert more.estimates["flops_before_growth"].value == pytest.approx(plan.estimates["total_flops"].value, rel=1e-3)
    other = Train.read({**GROWN, "init": "stack"}).plan(
        {"data": facts["data"], "model": facts_of(grown)}, describe("cpu")
    )
    assert other.estimates["flops_before_growth"].value > grown.figures["flops_before_growth"].value


def test_a_training_upcycles_its_model(small, data_folder, tmp_path):
    """The loss before its first step is the dense model's; the plan counts what a token visits, and the folder is a Mixtral."""
    init = {"kind": "upcycle", "num_experts": 4, "granularity": 2, "router": {"kind": "softmax", "top_k": 2}}
    spec = Train.read({**SPEC, "steps": 4, "init": init})
    given = {"data": facts_of(Artifact.read(data_folder)), "model": facts_of(small)}
    plan = spec.plan(given, describe("cpu"))
    dense, config = Checkpoint(small.folder).config, plan.facts.config
    assert plan.estimates["train_flops"].value == pytest.approx(
        plan.estimates["flops_before_growth"].value * 4 / 8, rel=0.05
    ), "half of the steps, of as many active weights and the router"
    assert config.active_params == dense.num_params + 4 * 4 * config.hidden_size
    made = spec.make(tmp_path / "train-moe", {"data": Artifact.read(data_folder), "model": small}, QUIET)
    figures = made.figures
    assert abs(figures["loss_after_growth"].value - figures["loss_before_growth"].value) <= 1e-5
    assert "upcycle: the same logits" in figures["loss_after_growth"].note
    assert figures["val_loss"].value < figures["loss_after_growth"].value
    loaded = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    assert type(loaded).__name__ == "MixtralForCausalLM" and loaded.num_parameters() == config.num_params


def test_ranks_that_divide_experts_upcycle_alike(small, data_folder, tmp_path):
    """Each makes a layer's experts of the dense model's files and keeps its own; the folder has those of all."""
    init = {
        "kind": "upcycle",
        "num_experts": 4,
        "granularity": 2,
        "router": {"kind": "softmax", "top_k": 2},
        "balance": [],
    }
    spec = {**SPEC, "steps": 2, "optimizer": {"lr": 3e-3, **STEADY}, "init": init}
    more, names = {"model": str(small.folder)}, ("alone", "divided")
    made_in_turn(str(data_folder), [({**spec, "gradient_accumulation_steps": 2}, str(tmp_path / "alone"), more)])
    layout = {"expert_parallel_degree": 2, "data_parallel": "zero3"}
    on_ranks(2, made_in_turn, str(data_folder), [({**spec, "parallelism": layout}, str(tmp_path / "divided"), more)])
    alone, divided = (load(tmp_path / name).state_dict() for name in names)
    assert alone.keys() == divided.keys() and any(
        "gate_up" in name and one.shape[0] == 4 for name, one in alone.items()
    )
    for name, values in divided.items():
        torch.testing.assert_close(values, alone[name], atol=2e-6, rtol=0)


def test_init_is_a_word_a_technique_or_several():
    stack = Train.read({**SPEC, "init": "stack"})
    assert stack == Train.read({**SPEC, "init": {"kind": "stack"}}) == Train.read({**SPEC, "init": ["stack"]})
    assert stack.init[0].kind == "stack" and Train.read(json.loads(json.dumps(stack.model_dump(mode="json")))) == stack
    assert Train.read(SPEC).model_dump(mode="json")["init"] == "random"
    assert Train.from_overrides({"init.kind": "stack", "init.num_layers": "6"}).init[0].num_layers == 6
    both = Train.read({**SPEC, "init": [WIDE, {"kind": "block_expansion", "num_layers": 6}]})
    assert [one.kind for one in both.init] == ["net2net", "block_expansion"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": "stack"}, "none is given"),
        ({"init": "stak"}, "did you mean 'stack'"),
        ({"init": {"kind": "stack", "layers": 3}}, "no field 'layers'"),
        ({"init": "stack", "checkpoint": {"load": "optimizer"}}, "reads an optimizer's state"),
    ],
)
def test_mistakes_are_said(change, message, data_folder, tmp_path):
    with pytest.raises(SpecError) as caught:
        Train.read({**SPEC, **change}).make(tmp_path / "train-x", {"data": Artifact.read(data_folder)}, QUIET)
    assert message in str(caught.value)


def test_a_model_that_hone_did_not_train(small, tmp_path, data_folder):
    """What is not known of its training is absent."""
    folder = tmp_path / "foreign"
    transformers.AutoModelForCausalLM.from_pretrained(small.folder, dtype=torch.float32).save_pretrained(folder)
    parents = {"data": Artifact.read(data_folder), "model": Artifact.read(folder)}
    spec = Train.read({**GROWN, "steps": 2, "init": "block_expansion"})
    made = spec.make(tmp_path / "train-x", parents, QUIET)
    assert made.figures["flops_before_growth"].value is None and "total_flops" not in made.figures
    assert made.figures["loss_after_growth"].value == pytest.approx(made.figures["loss_before_growth"].value, abs=1e-5)


def test_a_training_that_broke_off_ends_with_the_same_bytes(small, grown, data_folder, tmp_path, monkeypatch):
    """The losses around growth are those of its first run: a resumed one has no weights of that step."""
    step = Trainer.step

    def breaking(self, batch):
        if self.done == 2:
            raise ZeroDivisionError
        return step(self, batch)

    monkeypatch.setattr(Trainer, "step", breaking)
    spec = Train.read({**GROWN, "checkpoint": {"interval": 1}})
    parents = {"data": Artifact.read(data_folder), "model": small}
    with pytest.raises(ZeroDivisionError):
        spec.make(tmp_path / "train-large", parents, QUIET)
    monkeypatch.setattr(Trainer, "step", step)
    made = spec.make(tmp_path / "train-large", parents, QUIET)
    assert made.content == grown.content
    assert made.figures["loss_after_growth"].value == grown.figures["loss_after_growth"].value


def test_ranks_that_hold_parts_make_the_same_model(small, data_folder, tmp_path):
    """Each makes the parts that it holds of the smaller model's files."""
    kinds = [{"data_parallel": "zero3"}, {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}]
    spec = {**GROWN, "steps": 2, "optimizer": {"lr": 3e-3, **STEADY}, "init": [WIDE, "block_expansion"]}
    spec["gradient_accumulation_steps"] = 2
    more = {"model": str(small.folder)}
    made_in_turn(str(data_folder), [(spec, str(tmp_path / "alone"), more)])
    names = [f"ranks-{number}" for number in range(len(kinds))]
    each = [
        ({**spec, "parallelism": kind}, str(tmp_path / name), more) for name, kind in zip(names, kinds, strict=True)
    ]
    on_ranks(2, made_in_turn, str(data_folder), each)
    alone = Artifact.read(tmp_path / "alone")
    weights = load(alone.folder).state_dict()
    for name in names:
        found = Artifact.read(tmp_path / name)
        for key, values in load(found.folder).state_dict().items():
            torch.testing.assert_close(values, weights[key], atol=2e-6, rtol=0)
        after = alone.figures["loss_after_growth"].value
        assert found.figures["loss_after_growth"].value == pytest.approx(after, abs=1e-5)
        assert found.figures["loss_before_growth"].value is None
