"""Reward models: the loss against scores of whole answers alone, a training that ranks held-out pairs, and transformers' logits of its folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.eval.stage import Eval
from hone.feed.load import IGNORE, Batch, PackedTokens
from hone.measure.machine import machine_of
from hone.model.decoder import build
from hone.model.families.config_json import from_hf, to_hf
from hone.model.hf import load
from hone.serve.http.server import serve
from hone.serve.stage import Serve
from hone.train import OBJECTIVES
from hone.train.cached_logits.stage import Teach
from hone.train.loop import Trainer
from hone.train.objectives.preference.reward import whole_answers
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE, content_after_kills, write_data
from tests.train.objectives.preference.pairs import write_pairs

QUIET = Run(quiet=True)
SPEC = {"model": SHAPE.model_dump(), "optimizer": {"lr": 3e-3}, "batch_size": 4, "seq_len": 64, "objective": "reward"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("numba")
    return write_pairs(tmp_path_factory.mktemp("made") / "data-pairs")


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    spec = {**SPEC, "steps": 24, "validation": {"interval": 12}}
    return Train.read(spec).make(
        tmp_path_factory.mktemp("trained") / "train-reward", {"data": Artifact.read(folder)}, QUIET
    )


def answers(data: PackedTokens, document: int) -> tuple[list[int], list[int]]:
    """The tokens of the chosen and the rejected answer of a pair, prompts included."""
    places = slice(int(data.starts[document]), int(data.starts[document + 1]))
    ids, marks = np.array(data.tokens[places]), np.array(data.trained[places])
    return ids[marks & 2 == 0].tolist(), ids[marks & 2 == 2].tolist()


def test_a_document_ends_with_its_last_target():
    batch = Batch(
        np.array([[5, 6, 7, 8, 9, 1]]), np.array([[IGNORE, 7, IGNORE, IGNORE, 2, IGNORE]]), np.array([[0, 0, 1, 1, 2, -1]])
    )  # fmt: skip
    tokens, targets, ids = whole_answers(batch)[:3]
    assert tokens.tolist() == [[5, 6, 7, 7, 8, 9, 2]]
    assert targets.tolist() == [[IGNORE, IGNORE, 0, IGNORE, IGNORE, IGNORE, 0]]
    assert ids.tolist() == [[0, 0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize("options", [{}, {"margin": 0.5, "center": 0.1}], ids=["plain", "options"])
def test_value_and_gradient_are_those_of_answers_alone_however_a_batch_is_divided(options, folder):
    data = PackedTokens(folder)
    batch, index = data.cut(np.arange(4), 64), data.packing_index(64)
    starts = index.pieces[index.firsts[0] : index.firsts[4], 0]
    documents = np.searchsorted(data.starts, starts, side="right") - 1
    for parts in (1, 2):
        trainer = Trainer(
            build(SHAPE.config(data.vocab_size).scoring(), seed=3), steps=1, schedule=Cosine(warmup=0),
            objective=OBJECTIVES.read({"kind": "reward", **options}), gradient_accumulation_steps=parts,
        )  # fmt: skip
        sums, counts = trainer.gradients(trainer.prepared(batch))
        model = trainer.model
        ours = {name: one.grad.clone() * counts.targets for name, one in model.named_parameters()}
        model.zero_grad()
        total = torch.zeros(())
        for document in documents.tolist():
            good, bad = (model(torch.tensor([one]))[0, -1, 0] for one in answers(data, document))
            total = total - F.logsigmoid(good - bad - options.get("margin", 0.0))
            total = total + options.get("center", 0.0) * (good + bad) ** 2
        total.backward()
        assert counts.targets == len(documents)
        torch.testing.assert_close(sums.loss, total.detach(), rtol=1e-5, atol=1e-5)
        for name, one in model.named_parameters():
            torch.testing.assert_close(ours[name], one.grad, rtol=1e-3, atol=1e-5)


def test_a_trained_model_ranks_held_out_pairs(made):
    rows = [row for row in read_jsonl(made.folder / "steps.jsonl") if "val_loss" in row]
    assert rows[-1]["val_accuracy"] >= 0.75 and rows[-1]["val_loss"] == rows[-1]["val_preference_loss"] < 0.65
    assert made.figures["val_loss"].unit == "nats/pair" and "val_bits_per_byte" not in made.figures


def test_transformers_computes_the_same_scores_and_its_folder_is_read(made, folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(made.folder).eval()
    assert theirs.config.num_labels == 1
    theirs.save_pretrained(tmp_path / "theirs")
    ours, again = (load(one, dtype=torch.float32, scores=True) for one in (made.folder, tmp_path / "theirs"))
    data = PackedTokens(folder, "val")
    for answer in answers(data, 0):
        tokens = torch.tensor([answer])
        with torch.no_grad():
            wanted = theirs(tokens).logits[0, 0]
            torch.testing.assert_close(ours(tokens)[0, -1, 0], wanted, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(again(tokens)[0, -1, 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3"])
def test_families_name_the_classes_of_transformers(family):
    modeling = pytest.importorskip("transformers.models.auto.modeling_auto")
    names = modeling.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    from hone.model.families import FAMILIES

    assert FAMILIES[family].classifier == names[family]


def test_a_config_of_several_labels_is_refused(folder):
    values = to_hf(SHAPE.config(64).scoring())
    assert from_hf(values).num_labels == 1
    with pytest.raises(SpecError, match="3 labels"):
        from_hf(values | {"id2label": dict.fromkeys("012", "x")})


def test_it_begins_with_a_language_model_and_goes_on_with_itself(made, folder, tmp_path):
    data = Artifact.read(folder)
    plain = {**SPEC, "objective": "simpo", "steps": 1, "model": {**SHAPE.model_dump(), "tie_embeddings": False}}
    base = Train.read(plain).make(tmp_path / "train-base", {"data": data}, QUIET)
    one = {**{key: SPEC[key] for key in ("batch_size", "seq_len", "objective")}, "steps": 1, "optimizer": {"lr": 1e-9}}
    scored = Train.read(one).make(tmp_path / "train-scored", {"data": data, "model": base}, QUIET)
    first, made_of = load(base.folder), load(scored.folder, scores=True)
    torch.testing.assert_close(first.layers[0].mixer.qkv.weight, made_of.layers[0].mixer.qkv.weight, rtol=0, atol=1e-6)
    assert made_of.lm_head.weight.shape == (1, SHAPE.hidden_size)
    names = json.loads((scored.folder / "config.json").read_text())["architectures"]
    assert names == ["LlamaForSequenceClassification"]
    more = Train.read(one).make(tmp_path / "train-more", {"data": data, "model": made}, QUIET)
    theirs, ours = load(more.folder, scores=True), load(made.folder, scores=True)
    torch.testing.assert_close(theirs.lm_head.weight, ours.lm_head.weight, rtol=0, atol=1e-6)


def test_mistakes_say_the_way_out(made, folder, tmp_path):
    data = Artifact.read(folder)
    with pytest.raises(SpecError, match="reward model, which scores texts"):
        load(made.folder)
    wrong = [
        ({**SPEC, "objective": "simpo", "model": None}, {"data": data, "model": made}, "is a reward model"),
        ({**SPEC, "adapter": "lora", "model": None}, {"data": data, "model": made}, "without adapter"),
        ({**SPEC, "seq_len": SHAPE.max_seq_len}, {"data": data}, "leaves no place"),
        (SPEC, {"data": Artifact.read(write_data(tmp_path / "data-text"))}, "compares answers"),
    ]
    for spec, parents, said in wrong:
        spec = {key: value for key, value in spec.items() if value is not None} | {"steps": 1}
        with pytest.raises(SpecError, match=said):
            Train.read(spec).make(tmp_path / "train-wrong", parents, QUIET)


def test_what_needs_a_head_of_tokens_refuses_it_when_planned(made, folder, monkeypatch):
    """Before a weight is read."""
    monkeypatch.setattr("hone.model.shards.Shards.tensor", None)
    facts, machine = {"data": facts_of(Artifact.read(folder)), "model": facts_of(made)}, machine_of(QUIET)
    for stage in (Eval.read({}), Compress.read({"steps": ["rtn"]}), Serve.read({}), Teach.read({"seq_len": 32})):
        with pytest.raises(SpecError, match="is a reward model, which scores texts"):
            stage.plan(facts, machine)
    with pytest.raises(SpecError, match="is a reward model, which scores texts"):
        serve(made.folder)


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bytes(folder, tmp_path):
    spec = {**SPEC, "steps": 12, "checkpoint": {"interval": 3}}
    whole = Train.read(spec).make(tmp_path / "train-whole", {"data": Artifact.read(folder)}, QUIET).content
    assert content_after_kills(spec, folder, tmp_path / "train-killed", [5, 9]) == whole
