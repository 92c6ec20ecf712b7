"""Mixed precision: float32 masters, the dynamic loss scale, and a step skipped on overflow."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import FitError
from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.train.loop import Trainer
from hone.train.precision import INITIAL_SCALE, LossScaler
from hone.train.schedules.cosine import Cosine
from tests.train.conftest import SHAPE


def make(data: PackedTokens, precision: str, **options) -> Trainer:
    model = build(SHAPE.config(data.vocab_size), seed=3)
    return Trainer(model, steps=20, schedule=Cosine(warmup=2), precision=precision, **options)


def test_masters_are_the_float32_originals(data_folder):
    data = PackedTokens(data_folder)
    exact = dict(build(SHAPE.config(data.vocab_size), seed=3).named_parameters())
    trainer = make(data, "bf16")
    for name, parameter in trainer.model.named_parameters():
        master = trainer.update.weights.masters[name]
        assert parameter.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert torch.equal(master, exact[name]) and torch.equal(parameter, exact[name].bfloat16())
    for step in range(3):
        trainer.step(data.batch(step, 4, 32, 0))
    for name, parameter in trainer.model.named_parameters():
        master = trainer.update.weights.masters[name]
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(master, master.bfloat16().float()), "the master keeps bits that bf16 cannot"


@pytest.mark.parametrize("parts", [1, 2])
def test_an_overflow_skips_the_step_and_halves_the_scale(data_folder, parts):
    data = PackedTokens(data_folder)
    trainer = make(data, "fp16", gradient_accumulation_steps=parts)
    trainer.step(data.batch(0, 4, 32, 0))
    before = {name: tensor.clone() for name, tensor in trainer.update.state().items()}
    assert trainer.scaler.scale == INITIAL_SCALE
    trainer.scaler.scale = 2.0**40  # certain to overflow float16 gradients
    step = trainer.step(data.batch(1, 4, 32, 0))
    assert step.skipped and step.grad_norm is None and step.row()["skipped"] is True
    assert trainer.scaler.scale == 2.0**39 and trainer.scaler.good_steps == 0
    after = trainer.update.state()
    assert all(torch.equal(before[name], after[name]) for name in before), "a skipped step changed something"
    trainer.scaler.scale = INITIAL_SCALE
    step = trainer.step(data.batch(1, 4, 32, 0))
    assert not step.skipped and trainer.done == 3


def test_an_injected_infinity_skips(data_folder):
    data = PackedTokens(data_folder)
    trainer = make(data, "fp16")

    def poison(parameter):
        parameter.grad[0] = float("inf")

    handle = trainer.model.norm.weight.register_post_accumulate_grad_hook(poison)
    weights = trainer.model.embedding.clone()
    assert trainer.step(data.batch(0, 4, 32, 0)).skipped
    assert torch.equal(weights, trainer.model.embedding) and trainer.scaler.scale == INITIAL_SCALE / 2
    handle.remove()
    assert not trainer.step(data.batch(0, 4, 32, 0)).skipped


def test_fp16_follows_fp32(data_folder):
    data = PackedTokens(data_folder)
    exact, half = make(data, "fp32"), make(data, "fp16")
    for step in range(6):
        batch = data.batch(step, 4, 48, 0)
        one, other = exact.step(batch), half.step(batch)
        assert one.loss == pytest.approx(other.loss, rel=5e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)


def test_the_scale_grows_after_good_steps():
    scaler = LossScaler(enabled=True, growth_interval=3)
    for _ in range(3):
        scaler.passed()
    assert scaler.scale == 2 * INITIAL_SCALE and scaler.good_steps == 0
    scaler.passed()
    again = LossScaler(enabled=True, growth_interval=3)
    again.restore(scaler.state())
    assert (again.scale, again.good_steps) == (scaler.scale, 1)


def test_a_scale_without_end_is_said():
    scaler = LossScaler(enabled=True)
    with pytest.raises(FitError, match="overflow even at a loss scale"):
        for _ in range(100):
            scaler.overflowed()
