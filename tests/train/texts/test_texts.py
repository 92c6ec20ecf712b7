"""Text that models write during a distillation: its prompts, its tokens and its targets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hone.feed.load import IGNORE, Batch
from hone.train.texts import TEXTS
from hone.train.texts.writing import laid_out
from tests.train.objectives.test_objectives import VOCAB, model


def read(text, given: Batch, step: int = 0, rank: int = 0, student=None, teacher=None) -> Batch:
    """What a training in its `step` reads of `given` on data-parallel rank `rank`."""
    trained = SimpleNamespace(model=student, teacher=teacher, done=step, ranks=SimpleNamespace(data=(rank, 2)))
    preparer = text.preparer()
    return given if preparer is None else preparer.prepare(trained, given)


def rows() -> Batch:
    """A document, one of conversation whose answer begins at 6, and a document of 4 tokens before another."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, 20))
    targets = np.roll(tokens, -1, 1)
    targets[:, -1] = IGNORE
    targets[1, :6] = IGNORE
    targets[2, 3] = IGNORE
    ids = np.zeros((3, 20), np.int32)
    ids[2, 4:] = 1
    return Batch(tokens, targets, ids)


def test_the_student_continues_prompts_and_its_own_tokens_are_the_targets():
    student, given = model(0), rows()
    text = TEXTS.read({"kind": "student", "share": 1.0, "prompt_tokens": 5, "sampling_temperature": 0.0})
    found = read(text, given, 3, 0, student, None)
    assert given.tokens[0, 7] == rows().tokens[0, 7]  # the batch itself is untouched
    for row, prompt in enumerate((5, 7, 4)):
        assert (found.tokens[row, :prompt] == given.tokens[row, :prompt]).all()
        valid = np.flatnonzero(found.targets[row] != IGNORE)
        assert valid[0] == prompt - 1 and (np.diff(valid) == 1).all()
        with torch.no_grad():
            likely = student(torch.from_numpy(found.tokens[row : row + 1]))[0].argmax(-1).numpy()
        assert (found.targets[row, valid] == likely[valid]).all()


def test_draws_depend_on_step_rank_and_seed_alone_and_follow_the_student():
    student, given = model(0), rows()
    text = TEXTS.read({"kind": "student", "share": 1.0, "prompt_tokens": 2})
    one, again, later = (read(text, given, step, 0, student, None) for step in (1, 1, 2))
    other = read(text, given, 1, 1, student, None)
    assert (one.tokens == again.tokens).all()
    assert (one.tokens != later.tokens).any() and (one.tokens != other.tokens).any()
    many = Batch(*(np.repeat(array[:1], 2000, 0)[:, :3] for array in given))
    drawn = read(text, many, 0, 0, student, None).targets[:, 1]
    with torch.no_grad():
        p = student(torch.from_numpy(given.tokens[:1, :2]))[0, 1].softmax(-1).numpy()
    counts = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert np.abs(counts - p).max() < 5 * 0.5 / np.sqrt(len(drawn))


def test_a_share_of_the_steps_reads_the_data():
    text = TEXTS.read({"kind": "student", "share": 0.25, "prompt_tokens": 19})
    student, given = model(0), rows()
    own = sum(read(text, given, step, 0, student, None) is not given for step in range(80))
    assert own == pytest.approx(20, abs=12)


def test_the_teacher_begins_with_its_most_likely_tokens():
    teacher, given = model(1), rows()
    text = TEXTS.read({"kind": "teacher", "greedy_tokens": 3})
    one, two = (read(text, given, step, 0, model(0), teacher) for step in (0, 1))
    assert (one.tokens[0, :4] == two.tokens[0, :4]).all() and (one.tokens[0] != two.tokens[0]).any()
    with torch.no_grad():
        likely = teacher(torch.from_numpy(one.tokens[:1]))[0].argmax(-1).numpy()
    assert (one.tokens[0, 1:4] == likely[:3]).all()


def test_text_ends_where_a_document_does():
    tokens, targets, ids = laid_out([5, 6, 7, 2], 2, 6, (2,))
    assert tokens.tolist() == [5, 6, 7, 2, 0] and targets.tolist() == [IGNORE, 7, 2, IGNORE, IGNORE]
    assert ids.tolist() == [0, 0, 0, 0, -1]
    _, targets, ids = laid_out([2, 2, 7, 8], 2, 4, (2,))  # those of the prompt do not end it
    assert targets.tolist() == [IGNORE, 7, 8] and ids.tolist() == [0, 0, 0]


def test_the_data_are_read_as_they_are():
    given = rows()
    assert read(TEXTS.read("data"), given, 3, 1, model(0), None) is given


def test_with_alpha_0_the_teachers_text_is_sequence_level_distillation():
    """Cross entropy of what the teacher wrote, and nothing of its distribution. Kim and Rush 2016, arXiv:1606.07947."""
    from hone.train import OBJECTIVES
    from hone.train.loop import Trainer
    from hone.train.schedules.cosine import Cosine

    text = {"kind": "teacher", "prompt_tokens": 5, "greedy_tokens": 20}
    objective = OBJECTIVES.read({"kind": "distill", "alpha": 0.0, "text": text})
    teacher, student, given = model(1), model(0), rows()
    written = read(objective.text, given, 0, 0, student, teacher)
    tokens, targets = torch.from_numpy(written.tokens), torch.from_numpy(written.targets)
    one = Trainer(student, steps=1, schedule=Cosine(warmup=0), objective=objective, teacher=teacher)
    with torch.no_grad():
        logits = student(tokens).flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, targets.flatten())
    assert one.step(given).loss == pytest.approx(float(wanted), rel=1e-5)
