"""References that are computed once, and those of adapters, which are the model itself as it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.feed.load import PackedTokens
from hone.measure.machine import machine_of
from hone.model.decoder import build
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.at_start import AtStart
from hone.train.objectives.preference.measure import held_out
from hone.train.optimizers.adamw import AdamW
from hone.train.passes import to_device
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE
from tests.train.objectives.preference.pairs import write_pairs

QUIET = Run(quiet=True)
CACHED = {"kind": "dpo", "beta": 0.3, "precompute_ref_log_probs": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("numba")
    return write_pairs(tmp_path_factory.mktemp("made") / "data-pairs")


def trainer_of(data, options, parts: int = 1) -> Trainer:
    model, reference = (build(SHAPE.config(data.vocab_size), seed=seed) for seed in (3, 4))
    return Trainer(
        model, steps=8, schedule=Cosine(warmup=0), optimizer=AdamW(lr=3e-3), objective=OBJECTIVES.read(options),
        teacher=reference, gradient_accumulation_steps=parts,
    )  # fmt: skip


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_cached_reference_gives_the_same_loss_and_computes_each_sequence_once(loss, folder):
    data = PackedTokens(folder)
    each, cached = (
        trainer_of(data, {**CACHED, "loss": loss, **more}, 2) for more in ({"precompute_ref_log_probs": False}, {})
    )
    count = data.num_sequences(64)
    for step in range(6):
        batch = data.batch(step, 4, 64, 0)
        assert cached.step(batch).loss == pytest.approx(each.step(batch).loss, rel=1e-4)
    assert 6 * 4 > count >= cached.preparer.computed
    found = [held_out(one, PackedTokens(folder, "val"), batch_size=4, seq_len=64) for one in (each, cached)]
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_a_cache_comes_back_from_a_checkpoint_as_it_was(folder):
    data = PackedTokens(folder)
    first, second = trainer_of(data, CACHED), trainer_of(data, CACHED)
    batch = data.cut(np.arange(3), 64)
    wanted = first.prepared(batch)
    second.preparer.restore(first.preparer.state())
    second.teacher = None
    assert (second.prepared(batch).values == wanted.values).all() and second.preparer.computed == 0
    assert trainer_of(data, CACHED).preparer.state() == {}


def test_the_reference_of_an_adapter_is_the_model_as_it_was(folder):
    data = PackedTokens(folder)
    model = build(SHAPE.config(data.vocab_size), seed=3)
    first = copy.deepcopy(model)
    for name, one in model.named_parameters():
        one.requires_grad_("mixer" in name)  # as an adapter: a part is trained
    reference = AtStart(model)
    assert 0 < reference.num_bytes < sum(one.nbytes for one in model.parameters())
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(0.1)
    now = {name: one.data_ptr() for name, one in model.named_parameters()}
    tokens, _, context = to_device(data.cut(np.arange(2), 64), torch.device("cpu"))
    assert torch.equal(reference.hidden(tokens, context), first.hidden(tokens, context))
    assert not torch.equal(model.hidden(tokens, context), first.hidden(tokens, context))
    assert now == {name: one.data_ptr() for name, one in model.named_parameters()} and model.training


def test_adapters_need_no_second_model(folder, tmp_path):
    data = Artifact.read(folder)
    spec = {"model": SHAPE.model_dump(), "batch_size": 4, "seq_len": 64, "steps": 1, "objective": "simpo"}
    base = Train.read(spec).make(tmp_path / "train-base", {"data": data}, QUIET)
    adapted = {
        "batch_size": 4, "seq_len": 64, "steps": 8, "optimizer": {"lr": 1e-2}, "objective": "dpo",
        "adapter": {"kind": "lora", "rank": 4}, "validation": {"interval": 4},
    }  # fmt: skip
    made = Train.read(adapted).make(tmp_path / "train-alone", {"data": data, "model": base}, QUIET)
    beside = Train.read(adapted).make(tmp_path / "train-beside", {"data": data, "model": base, "teacher": base}, QUIET)
    alone, other = (one.figures["val_margin"].value for one in (made, beside))
    assert alone > 0.001 and alone == pytest.approx(other, rel=1e-3)
    facts = {role: facts_of(one) for role, one in (("data", data), ("model", base), ("teacher", base))}
    grown = []
    for roles in (("data", "model"), ("data", "model", "teacher")):
        plan = Train.read(adapted).plan({role: facts[role] for role in roles}, machine_of(QUIET))
        grown.append(plan.estimates["memory_growth_bytes"].value)
    assert grown[1] - grown[0] == pytest.approx(4 * base.figures["num_params"].value, rel=0.1)
    with pytest.raises(SpecError, match="needs a teacher"):
        Train.read({**adapted, "adapter": None}).make(tmp_path / "train-no", {"data": data, "model": base}, QUIET)
