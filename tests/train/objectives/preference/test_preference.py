"""Objectives on pairs against their formulas over whole logits, over any division of a batch, and in small trainings on held-out pairs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.run import Run
from hone.feed.load import IGNORE, PackedTokens
from hone.model.decoder import build
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.preference.measure import held_out
from hone.train.optimizers.adamw import AdamW
from hone.train.passes import to_device
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE, write_data
from tests.train.objectives.preference.pairs import write_pairs

QUIET = Run(quiet=True)
KINDS = [
    {"kind": "dpo", "beta": 0.3},
    {"kind": "dpo", "beta": 0.3, "label_smoothing": 0.1},
    {"kind": "dpo", "beta": 0.3, "loss": "hinge"},
    {"kind": "dpo", "beta": 0.3, "loss": "ipo"},
    {"kind": "orpo", "weight": 0.7},
    {"kind": "simpo"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("numba")
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def models(data: PackedTokens, dtype=torch.float64):
    """A model, and its reference, which is another one."""
    return tuple(build(SHAPE.config(data.vocab_size), seed=seed).to(dtype) for seed in (3, 4))


def formula(options, data: PackedTokens, model, reference, documents) -> torch.Tensor:
    """The losses of pairs summed, each answer alone through the whole model, by the papers' formulas."""

    def scores(one, document):
        ids = torch.from_numpy(np.array(data.tokens[data.starts[document] : data.starts[document + 1]], np.int64))
        marks = torch.from_numpy(np.array(data.trained[data.starts[document] : data.starts[document + 1]], np.int64))
        found = []
        for side in (0, 2):
            answer, kept = ids[marks & 2 == side], (marks[marks & 2 == side] & 1)[1:].bool()
            tokens, _, context = to_device(type(batch)(*(part[None] for part in (answer[:-1].numpy(), answer[1:].numpy(), np.zeros(len(answer) - 1, np.int32)))), torch.device("cpu"))  # fmt: skip
            logits = one.head_input(one.hidden(tokens, context))[0] @ one.head_weight.T
            found.append(torch.log_softmax(logits, -1)[kept, answer[1:][kept]])
        return found

    batch = data.cut(np.arange(1), 64)
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        (chosen, rejected) = scores(model, document)
        with torch.no_grad():
            ref_chosen, ref_rejected = scores(reference, document)
        beta = options.get("beta")
        if options["kind"] == "dpo":
            logit = beta * ((chosen.sum() - ref_chosen.sum()) - (rejected.sum() - ref_rejected.sum()))
            wrong = options.get("label_smoothing", 0.0)
            loss = -(1 - wrong) * torch.log(torch.sigmoid(logit)) - wrong * torch.log(torch.sigmoid(-logit))
            if options.get("loss") == "hinge":
                loss = torch.clamp(1 - logit, min=0)
            if options.get("loss") == "ipo":
                mean = (chosen - ref_chosen).mean() - (rejected - ref_rejected).mean()
                loss = (mean - 1 / (2 * beta)) ** 2
        elif options["kind"] == "orpo":
            p, q = chosen.mean().exp(), rejected.mean().exp()
            odds = torch.log(p / (1 - p)) - torch.log(q / (1 - q))
            loss = -chosen.mean() - options["weight"] * F.logsigmoid(odds)
        else:
            loss = -F.logsigmoid(2.0 * (chosen.mean() - rejected.mean()) - 0.5)
        total = total + loss
    return total


@pytest.mark.parametrize("options", KINDS, ids=lambda row: "-".join(map(str, row.values())))
def test_value_and_gradient_are_those_of_the_formula(options, folder):
    data = PackedTokens(folder)
    model, reference = models(data)
    objective = OBJECTIVES.read(options)
    batch = data.cut(np.arange(3), 64)
    tokens, targets, context = to_device(batch, torch.device("cpu"))
    taught = reference.hidden(tokens, context).detach() if objective.from_teacher else None
    ours = objective.total_in(model, model.hidden(tokens, context), targets, context, reference, taught)
    ours.backward()
    gradients = {name: part.grad.clone() for name, part in model.named_parameters()}
    model.zero_grad()
    index = data.packing_index(64)
    starts = index.pieces[index.firsts[0] : index.firsts[3], 0]
    documents = np.searchsorted(data.starts, starts, side="right") - 1
    theirs = formula(options, data, model, reference, documents.tolist())
    theirs.backward()
    assert objective.count_in(batch) == len(documents)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
    for name, part in model.named_parameters():
        torch.testing.assert_close(gradients[name], part.grad, rtol=1e-5, atol=1e-6)


def test_every_division_of_a_batch_has_the_same_gradient(folder):
    data = PackedTokens(folder)
    batch = data.cut(np.arange(4), 64)
    found = []
    for parts in (1, 2, 4):
        model, reference = models(data, torch.float32)
        trainer = Trainer(
            model, steps=1, schedule=Cosine(warmup=0), teacher=reference, objective=OBJECTIVES.read("dpo"),
            gradient_accumulation_steps=parts,
        )  # fmt: skip
        sums, counts = trainer.gradients(batch)
        found.append((float(sums.loss), counts.targets, float(sums.squared_norm)))
    for loss, count, norm in found[1:]:
        assert count == found[0][1]
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert norm == pytest.approx(found[0][2], rel=1e-4)


def test_what_a_loss_would_not_use_is_refused():
    with pytest.raises(SpecError, match="label_smoothing is of loss sigmoid: ipo has none"):
        OBJECTIVES.read({"kind": "dpo", "loss": "ipo", "label_smoothing": 0.1})


def test_a_sequence_without_a_whole_pair_counts_nothing(folder):
    batch = PackedTokens(folder).cut(np.arange(2), 64)
    batch.targets[:] = IGNORE
    objective = OBJECTIVES.read("simpo")
    model, _ = models(PackedTokens(folder))
    tokens, targets, context = to_device(batch, torch.device("cpu"))
    assert objective.count_in(batch) == 0
    assert objective.total_in(model, model.hidden(tokens, context), targets, context, None, None).item() == 0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dpo", "orpo", "simpo"])
def test_a_training_raises_the_margin_on_pairs_that_it_has_not_seen(kind, seed, folder):
    data, val = PackedTokens(folder), PackedTokens(folder, "val")
    model = build(SHAPE.config(data.vocab_size), seed=seed)
    objective = OBJECTIVES.read(kind)
    trainer = Trainer(
        model, steps=12, schedule=Cosine(warmup=2), optimizer=AdamW(lr=3e-3), objective=objective,
        teacher=copy.deepcopy(model) if objective.from_teacher else None,
    )  # fmt: skip
    before = held_out(trainer, val, batch_size=4, seq_len=64)
    for step in range(12):
        trainer.step(data.batch(step, 4, 64, seed))
    after = held_out(trainer, val, batch_size=4, seq_len=64)
    assert before["val_pairs"] == after["val_pairs"] == 8
    if objective.from_teacher:
        assert before["val_margin"] == 0 and before["val_preference_loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert after["val_margin"] > before["val_margin"] + 0.05
    assert after["val_preference_loss"] < before["val_preference_loss"] and after["val_accuracy"] >= 0.75


def test_the_stage_says_how_often_the_chosen_answer_wins_and_refuses_other_data(folder, tmp_path):
    spec = {"model": SHAPE.model_dump(), "batch_size": 4, "seq_len": 64, "steps": 3, "objective": {"kind": "simpo"}}
    pairs, plain = Artifact.read(folder), Artifact.read(write_data(tmp_path / "plain", 20))
    made = Train.read(spec).make(tmp_path / "train-pairs", {"data": pairs}, QUIET)
    last = [row for row in read_jsonl(made.folder / "steps.jsonl") if "val_margin" in row][-1]
    assert last["val_pairs"] == 8 and 0 <= last["val_accuracy"] <= 1
    with pytest.raises(SpecError, match="has no pairs"):
        Train.read(spec).make(tmp_path / "train-no", {"data": plain}, QUIET)
    with pytest.raises(SpecError, match="would learn both"):
        Train.read({**spec, "objective": "next_token"}).make(tmp_path / "train-no", {"data": pairs}, QUIET)
    with pytest.raises(SpecError, match="needs a teacher"):
        Train.read({**spec, "objective": "dpo"}).make(tmp_path / "train-no", {"data": pairs}, QUIET)
    with pytest.raises(SpecError, match=r"pairs of .* are longer than seq_len 12"):
        Train.read({**spec, "seq_len": 12}).make(tmp_path / "train-no", {"data": pairs}, QUIET)
