"""The loop against a plain PyTorch loop over the transformers model, and its invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

from hone.base.errors import HoneError
from hone.feed.load import Batch, PackedTokens
from hone.model.decoder import build
from hone.model.hf import load, save
from hone.train.activation_checkpointing import EveryNth
from hone.train.loop import Trainer, fit, to_device
from hone.train.objectives.distill import Distill
from hone.train.objectives.preference.measure import validate
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine
from hone.train.student import from_teacher
from tests.train.conftest import SHAPE, STEADY


def one_document_rows(data: PackedTokens, step: int) -> Batch:
    """A batch whose rows are taken as one document each, which is all that transformers' plain loop knows."""
    batch = data.batch(step, 4, 32, 0)
    targets = np.concatenate([batch.tokens[:, 1:], np.full((4, 1), -100)], 1)
    return Batch(batch.tokens, targets, np.zeros_like(batch.document_ids))


def make(data: PackedTokens, **options) -> Trainer:
    model = build(SHAPE.config(data.vocab_size), seed=3)
    return Trainer(model, **{"steps": 20, "schedule": Cosine(warmup=2), **options})


def test_same_losses_as_transformers_with_torch_adamw(data_folder, tmp_path):
    data = PackedTokens(data_folder)
    trainer = make(data, optimizer=AdamW(lr=3e-3, weight_decay=0.1), max_grad_norm=0.5)
    save(trainer.model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    matrices = [part for part in theirs.parameters() if part.ndim >= 2]
    vectors = [part for part in theirs.parameters() if part.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for step in range(5):
        batch = one_document_rows(data, step)
        ours = trainer.step(batch)
        tokens = torch.from_numpy(batch.tokens)
        loss = theirs(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * Cosine(warmup=2).share(step, 20)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(ours.loss - loss.item()) < 1e-5
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_equal_one_big_batch(data_folder, precision):
    data = PackedTokens(data_folder)
    optimizer = AdamW(lr=1e-3, **STEADY)
    whole, parts = (
        make(data, precision=precision, optimizer=optimizer, gradient_accumulation_steps=number) for number in (1, 4)
    )
    tolerance = 1e-6 if precision == "fp32" else 2e-3
    for step in range(4):
        batch = data.batch(step, 8, 48, 0)
        assert len(set((batch.targets == -100).sum(1))) > 1, "rows with equal counts would hide a wrong mean"
        one, other = whole.step(batch), parts.step(batch)
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=10 * tolerance)
    if precision == "fp32":
        for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mixer", ["attention", "compressive"])
@pytest.mark.parametrize("parts", [2, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(data_folder, mixer, parts):
    """In float64, with micro-batches of unequal numbers of targets, and with a mixer that adds a loss of its own."""
    data = PackedTokens(data_folder)
    sizes = {"segment": 8, "memory": 8, "compressed": 6, "ratio": 2} if mixer == "compressive" else {}
    config = SHAPE.model_copy(update={"mixers": ({"kind": mixer, **sizes},)}).config(data.vocab_size)
    batch = data.batch(0, 8, 48, 0)
    targets = batch.targets.copy()
    for row in range(8):
        targets[row, : 6 * row] = -100
    batch = batch._replace(targets=targets)
    trainers = []
    for count in (1, parts):
        trainer = Trainer(build(config, seed=3), steps=1, schedule=Cosine(), gradient_accumulation_steps=count)
        trainer.model.double()
        sums, counts = trainer.gradients(batch)
        assert counts.targets == (targets != -100).sum() and counts.tokens == 8 * 48
        assert (sums.extra is not None) == (mixer == "compressive")
        trainers.append((trainer, sums))
    (whole, one), (cut, other) = trainers
    for name in whole.update.weights.parameters:
        ours, theirs = cut.update.weights.grad(name), whole.update.weights.grad(name)
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
    assert other.squared_norm.item() == pytest.approx(one.squared_norm.item(), rel=1e-6)
    assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-6)
    if one.extra is not None:
        assert other.extra.item() == pytest.approx(one.extra.item(), rel=1e-10)


def test_an_extra_loss_is_written_down(data_folder):
    data = PackedTokens(data_folder)
    sizes = {"segment": 8, "memory": 8, "compressed": 6, "ratio": 2}
    config = SHAPE.model_copy(update={"mixers": ({"kind": "compressive", **sizes},)}).config(data.vocab_size)
    step = Trainer(build(config, seed=3), steps=1, schedule=Cosine()).step(data.batch(0, 4, 48, 0))
    assert step.extra_loss > 0 and step.row()["extra_loss"] == step.extra_loss
    assert "extra_loss" not in make(data).step(data.batch(0, 4, 48, 0)).row()


def test_packed_documents_do_not_see_each_other(data_folder):
    """Loss of a packed row = losses of its documents alone."""
    data = PackedTokens(data_folder)
    model = build(SHAPE.config(data.vocab_size), seed=3)
    batch = data.batch(0, 4, 64, 0)
    trainer = Trainer(model, steps=1, schedule=Cosine())
    together = trainer._loss(batch, 1)[0].item()
    apart = 0.0
    for row in range(4):
        for document in np.unique(batch.document_ids[row]):
            here = batch.document_ids[row] == document
            piece = Batch(
                batch.tokens[row, here][None], batch.targets[row, here][None], batch.document_ids[row, here][None]
            )
            apart += trainer._loss(piece, 1)[0].item()
    assert len(np.unique(batch.document_ids)) > 1
    assert together == pytest.approx(apart, rel=1e-6)


def test_the_gradient_is_clipped(data_folder):
    """One SGD-like look: with max_grad_norm the update's gradient has that norm, and the reported norm is the true one."""
    data = PackedTokens(data_folder)
    free, clipped = make(data, max_grad_norm=0.0), make(data, max_grad_norm=0.01)
    batch = data.batch(0, 4, 32, 0)
    assert free.step(batch).grad_norm == clipped.step(batch).grad_norm > 0.01
    # After one step the first moment is (1 - beta1) times the gradient that AdamW saw.
    first = clipped.update.state()
    moments = torch.cat([part.flatten() for name, part in first.items() if name.startswith("exp_avg.")])
    assert moments.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_decay_touches_matrices_only(data_folder):
    data = PackedTokens(data_folder)
    plain = make(data, optimizer=AdamW(lr=1e-2, weight_decay=0.0))
    decayed = make(data, optimizer=AdamW(lr=1e-2, weight_decay=0.5))
    batch = data.batch(0, 4, 32, 0)
    plain.step(batch)
    decayed.step(batch)
    lr = 1e-2 * Cosine(warmup=2).share(0, 20)
    before = dict(build(SHAPE.config(data.vocab_size), seed=3).named_parameters())
    for (name, one), other in zip(plain.model.named_parameters(), decayed.model.parameters(), strict=True):
        expected = before[name] * lr * 0.5 if one.ndim >= 2 else torch.zeros_like(one)
        torch.testing.assert_close(one - other, expected, rtol=1e-2, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(data_folder, precision):
    data = PackedTokens(data_folder)
    trainer = make(
        data, steps=40, precision=precision, optimizer=AdamW(lr=1e-2), activation_checkpointing=EveryNth(n=2)
    )
    val = PackedTokens(data_folder, "val")
    before = validate(trainer.model, val, batch_size=8, seq_len=64)
    fit(trainer, data, batch_size=8, seq_len=64)
    after = validate(trainer.model, val, batch_size=8, seq_len=64)
    assert before == pytest.approx(math.log(data.vocab_size), abs=0.3)
    assert after < 2.5


def test_a_loss_that_is_no_number_stops_with_a_way_out(data_folder):
    data = PackedTokens(data_folder)
    trainer = make(data)
    with torch.no_grad():
        trainer.model.layers[1].mixer.qkv.weight[0, 0] = float("nan")
    with pytest.raises(HoneError, match="diverged at step 1: loss nan") as caught:
        trainer.step(data.batch(0, 4, 32, 0))
    assert "optimizer.lr" in caught.value.fix


def test_validation_covers_each_target_once(data_folder):
    data = PackedTokens(data_folder, "val")
    model = build(SHAPE.config(data.vocab_size), seed=3)
    nats = count = 0.0
    for document in data.documents():
        tokens = torch.from_numpy(document)[None]
        with torch.no_grad():
            logits = model(tokens[:, :-1])
        nats += torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()
        count += tokens.shape[1] - 1
    # Rows longer than any document, so that only a few documents are cut: near, not equal.
    assert validate(model, data, batch_size=4, seq_len=128) == pytest.approx(nats / count, rel=0.02)


def test_validation_takes_as_many_rows_as_asked_for(data_folder):
    data = PackedTokens(data_folder, "val")
    model = build(SHAPE.config(data.vocab_size), seed=3)
    assert data.num_sequences(64) > 8
    three = validate(model, data, batch_size=1, seq_len=64, num_sequences=3)
    assert validate(model, data, batch_size=2, seq_len=64, num_sequences=3) == pytest.approx(three, rel=1e-5)
    assert validate(model, data, batch_size=8, seq_len=64, num_sequences=3) == pytest.approx(three, rel=1e-5)


def test_a_student_starts_as_every_second_layer(data_folder):
    data = PackedTokens(data_folder)
    teacher = build(SHAPE.config(data.vocab_size), seed=3)
    student = from_teacher(teacher, 2)
    assert student.config.num_layers == 2 and teacher.config.num_layers == 4
    batch = data.batch(0, 2, 32, 0)
    tokens, _, context = to_device(batch, torch.device("cpu"))
    x = teacher.embed(tokens)
    for index in (0, 2):
        x = teacher.layers[index](x, context)
    torch.testing.assert_close(student(tokens, context), teacher.head(x), rtol=0, atol=1e-6)
    student.embedding.data.zero_()
    assert teacher.embedding.abs().max() > 0, "the student shares nothing with its teacher"


@pytest.mark.slow
def test_distillation_brings_a_student_to_its_teacher(data_folder):
    data = PackedTokens(data_folder)
    trainer = make(data, steps=40, optimizer=AdamW(lr=1e-2))
    fit(trainer, data, batch_size=8, seq_len=64)
    teacher = trainer.model
    student = from_teacher(teacher, 2)
    frozen = {name: part.clone() for name, part in teacher.named_parameters()}
    learner = Trainer(
        student, steps=30, schedule=Cosine(), optimizer=AdamW(lr=3e-3), objective=Distill(alpha=1.0), teacher=teacher
    )
    first = learner.step(data.batch(0, 8, 64, 1)).loss
    fit(learner, data, batch_size=8, seq_len=64, seed=1)
    assert learner.done == 30
    last = learner._loss(data.batch(31, 8, 64, 1), 1)[0].item() / (8 * 64)
    assert last < 0.25 * first
    assert all(torch.equal(frozen[name], part) for name, part in teacher.named_parameters())


def test_the_saved_model_is_the_trained_one(data_folder, tmp_path):
    data = PackedTokens(data_folder)
    trainer = make(data, precision="bf16", steps=3)
    fit(trainer, data, batch_size=4, seq_len=32)
    save(trainer.model, tmp_path)
    back = load(tmp_path)
    assert back.embedding.dtype == torch.bfloat16
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(back(tokens), trainer.model(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9])
def test_compiled_layers_may_be_recomputed(data_folder, window):
    """What layers share is made before the first: traced into it, a second run would find it there and keep other tensors."""
    data = PackedTokens(data_folder)
    shape = SHAPE.model_copy(update={"family": "mistral", "window": window} if window else {})
    plain, compiled = (
        Trainer(
            build(shape.config(data.vocab_size), seed=3),
            steps=20,
            schedule=Cosine(warmup=2),
            activation_checkpointing=policy,
        )
        for policy in (None, EveryNth(n=2))
    )
    torch.compiler.reset()
    for layer in compiled.model.layers:
        layer.compile(dynamic=False, backend="aot_eager")
    for step in range(3):
        batch = data.batch(step, 4, 32, 0)
        assert plain.step(batch).loss == pytest.approx(compiled.step(batch).loss, abs=1e-5)


@pytest.mark.slow
def test_compiled_layers_give_the_same_loss(data_folder):
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    data = PackedTokens(data_folder)
    plain, compiled = make(data), make(data, compile=True)
    for step in range(3):
        batch = data.batch(step, 4, 32, 0)
        assert plain.step(batch).loss == pytest.approx(compiled.step(batch).loss, abs=1e-5)
