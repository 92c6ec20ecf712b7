"""The teacher that is the average of the student's own predictions of each text: its averages, its loss, its errors, and that a killed training goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.cost.train.training import CHECKPOINTS
from hone.feed.load import Batch
from hone.measure.machine import machine_of
from hone.model.context import Causal
from hone.train import OBJECTIVES
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer
from hone.train.passes import Step
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from hone.train.teachers.temporal_ensemble import added
from tests.train.conftest import SHAPE, content_after_kills
from tests.train.objectives.test_objectives import VOCAB, model

QUIET = Run(quiet=True)
TEXTS = np.random.default_rng(0).integers(0, VOCAB, (4, 12))
SPEC: dict[str, Any] = {
    "model": SHAPE.model_copy(update={"num_layers": 1}).model_dump(),
    "objective": {"kind": "distill", "alpha": 0.5, "teacher": {"kind": "temporal_ensemble", "k": 4}},
    "batch_size": 16,
    "seq_len": 64,
    "checkpoint": {"interval": 3},
    "validation": {"sequences": 4},
}


def batch(*rows: int) -> Batch:
    tokens = TEXTS[list(rows)]
    targets = np.roll(tokens, -1, 1)
    targets[:, -1] = -100
    return Batch(tokens, targets, np.zeros_like(tokens, dtype=np.int32))


def trainer(k: int, temperature: float = 1.0, **how: Any) -> Trainer:
    teacher = {"kind": "temporal_ensemble", "k": k, "decay": 0.6}
    fields = {"kind": "distill", "alpha": 0.5, "temperature": temperature, "teacher": teacher}
    return Trainer(model(0), steps=9, schedule=Cosine(warmup=0), objective=OBJECTIVES.read(fields), **how)


@pytest.mark.parametrize(("parts", "temperature", "k"), [(1, 1.0, 3), (2, 2.0, 5), (1, 1.0, VOCAB - 1)])
def test_the_loss_is_that_of_the_average_of_all_earlier_predictions(parts: int, temperature: float, k: int) -> None:
    """Against averages in float64, a dictionary a token; the first epoch has the text alone. Losses and gradients."""
    one = trainer(k, temperature, gradient_accumulation_steps=parts)
    averages: dict[tuple[int, int], dict[int, float]] = {}
    counts = [0] * len(TEXTS)
    for rows in ((0, 1), (2, 3), (1, 2), (3, 0), (0, 1), (0, 2)):
        given = batch(*rows)
        tokens, targets = (torch.from_numpy(part) for part in given[:2])
        logits = one.model(tokens, Causal(tokens)).double()
        total, soft = torch.zeros((), dtype=torch.float64), (logits / temperature).log_softmax(-1)
        for at, row in enumerate(rows):
            for place in range(12):
                log_q, old = soft[at, place], averages.get((row, place))
                if place < 11:
                    loss = F.cross_entropy(logits[at, place], targets[at, place])
                    if old is not None:
                        ids, p = list(old), torch.tensor(list(old.values())).double() / (1 - 0.6 ** counts[row])
                        p, q = (torch.cat((one, 1 - one.sum()[None])) for one in (p, log_q.exp()[ids]))
                        apart = sum(one * (one.log() - other.log()) for one, other in zip(p, q, strict=True) if one > 0)
                        loss = 0.5 * temperature**2 * apart + 0.5 * loss
                    total = total + loss
                new = {id: 0.6 * share for id, share in (old or {}).items()}
                values, likely = log_q.detach().exp().topk(k)
                for id, value in zip(likely.tolist(), values.tolist(), strict=True):
                    new[id] = new.get(id, 0.0) + 0.4 * value
                averages[row, place] = dict(sorted(new.items(), key=lambda pair: -pair[1])[:k])
            counts[row] += 1
        wanted = torch.autograd.grad(total / 22, list(one.model.parameters()))
        sums, found = one.gradients(given)
        assert float(sums.loss) / found.targets == pytest.approx(float(total.detach()) / 22, rel=1e-4)
        for parameter, gradient in zip(one.model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=2e-3, atol=1e-5)
        one.update.weights.drop_grads()
        one.tutor.drop_grads()  # the passes were made to be compared alone: the step makes them again
        one.step(given)
    assert one.teacher is None and counts == [4, 3, 3, 2]


def test_sparse_averages_are_added_as_dictionaries_are() -> None:
    draw = np.random.default_rng(1)
    ids, more = (torch.from_numpy(np.stack([draw.permutation(9)[:4] for _ in range(50)])).int() for _ in range(2))
    shares, new = (torch.from_numpy(draw.random((50, 4))).float() for _ in range(2))
    found, sums = added(ids, shares, more, new)
    for row in range(50):
        wanted: dict[int, float] = {}
        for names, values in ((ids, shares), (more, new)):
            for name, value in zip(names[row].tolist(), values[row].tolist(), strict=True):
                wanted[name] = wanted.get(name, 0.0) + value
        largest = sorted(wanted.items(), key=lambda pair: -pair[1])[:4]
        assert found[row].tolist() == [name for name, _ in largest]
        assert sums[row].tolist() == pytest.approx([value for _, value in largest])


def test_a_skipped_step_and_a_resumed_training_keep_the_averages(tmp_path: Any) -> None:
    one, other = trainer(3), trainer(3)
    one.step(batch(0, 1))
    before = {name: value.clone() for name, value in one.tutor.state().items()}
    one.gradients(batch(0, 2))
    one.tutor.stepped(one, Step(2, 1.0, 1e-3, None, 0, skipped=True))
    assert all(torch.equal(value, before[name]) for name, value in one.tutor.state().items())
    one.update.weights.drop_grads()
    checkpoints = Checkpoints(tmp_path, keep=1)
    one.save(checkpoints)
    checkpoints.finish()
    found = checkpoints.newest()
    assert found is not None
    other.restore(*found)
    for rows in ((1, 2), (2, 0)):
        assert one.step(batch(*rows)).loss == other.step(batch(*rows)).loss
    mine, theirs = one.tutor.state(), other.tutor.state()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def plan(data: Artifact, **changes: Any) -> Any:
    return Train.read({**SPEC, **changes}).plan({"data": facts_of(data)}, machine_of(QUIET))


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bytes(data_folder: Any, tmp_path: Any) -> None:
    """Killed in the second epoch, whose loss depends on the first; its checkpoints are as large as planned."""
    data = Artifact.read(data_folder)
    steps = 2 * plan(data, objective="next_token").steps
    spec = {**SPEC, "steps": steps}
    whole = Train.read(spec).make(tmp_path / "train-whole", {"data": data}, QUIET)
    plain = Train.read({**spec, "objective": "next_token"}).make(tmp_path / "train-plain", {"data": data}, QUIET)
    assert whole.content != plain.content
    sizes = whole.figures[CHECKPOINTS]
    assert sizes.value == pytest.approx(sizes.estimate.value, rel=0.05)
    killed = content_after_kills(spec, data_folder, tmp_path / "train-killed", (steps - steps // 3,))
    assert killed == whole.content


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({}, 2, "2 ranks"),
        ({"steps": 1}, 1, "read no text of"),
        (
            {"objective": {**SPEC["objective"], "teacher": {"kind": "temporal_ensemble", "k": 10**6}}},
            1,
            "leaves nothing",
        ),
        ({"objective": {**SPEC["objective"], "text": "student"}}, 1, "text student needs a teacher in memory"),
        ({"objective": {**SPEC["objective"], "kind": "relations"}}, 1, "objective relations needs a teacher in memory"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], ranks: int, said: str, data_folder: Any) -> None:
    data = Artifact.read(data_folder)
    spec = Train.read({**SPEC, "steps": 10**4, **changes})
    machine = machine_of(QUIET).model_copy(update={"num_ranks": ranks})
    with pytest.raises(SpecError, match=said) as caught:
        spec.plan({"data": facts_of(data)}, machine)
    assert caught.value.fix
