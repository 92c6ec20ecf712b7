"""Training on a CUDA device: the same losses as on the CPU, every precision, memory as predicted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.cost.train.figures import growth_bytes
from hone.cost.train.training import Training
from hone.cost.train.update import adamw
from hone.feed.load import Batch, PackedTokens
from hone.measure.window import Window
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.train import OPTIMIZERS
from hone.train.activation_checkpointing import EveryNth, KeepAll
from hone.train.checkpoint import Checkpoints
from hone.train.fp8.fits import fp8_products
from hone.train.loop import Trainer, fit
from hone.train.precision import FP8_RECIPES, TORCH_NAMES
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make(data: PackedTokens, device: str, **options) -> Trainer:
    model = build(SHAPE.config(data.vocab_size), device=device, seed=3)
    return Trainer(model, steps=20, schedule=Cosine(warmup=2), **options)


FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no fp8 products"
)


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ("fp32", 1e-3),
        ("bf16", 2e-2),
        ("fp16", 5e-3),
        *(pytest.param(name, 3e-2, marks=FP8) for name in FP8_RECIPES),
    ],
)
def test_same_losses_as_on_the_cpu(data_folder, precision, tolerance):
    data = PackedTokens(data_folder)
    exact, other = (
        make(data, "cpu"),
        make(data, "cuda", precision=precision, activation_checkpointing=EveryNth(n=2), gradient_accumulation_steps=2),
    )
    for step in range(5):
        batch = data.batch(step, 4, 48, 0)
        assert exact.step(batch).loss == pytest.approx(other.step(batch).loss, rel=tolerance)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_an_optimizer_steps_as_on_the_cpu(data_folder, name):
    """Muon orthogonalises in bfloat16 there, so its losses may drift apart a little more."""
    data = PackedTokens(data_folder)
    options = {"lr": 3e-3, **({"min_elements": 512} if name == "adamw_8bit" else {})}
    exact, other = (
        make(data, device, optimizer=OPTIMIZERS.read({"kind": name, **options})) for device in ("cpu", "cuda")
    )
    for step in range(8):
        batch = data.batch(step, 4, 48, 0)
        assert exact.step(batch).loss == pytest.approx(other.step(batch).loss, rel=2e-2 if name == "muon" else 3e-3)
    kept = sum(tensor.nbytes for state in other.update.states.values() for tensor in state.values())
    cost = other.optimizer.cost(other.model.config.dims(), "float32", "cuda")
    assert cost.state_bytes == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_an_optimizer_resumes_to_the_bit(data_folder, tmp_path, name):
    data, kept = PackedTokens(data_folder), Checkpoints(tmp_path)
    optimizer = OPTIMIZERS.read({"kind": name, **({"min_elements": 512} if name == "adamw_8bit" else {})})
    first = make(data, "cuda", precision="bf16", optimizer=optimizer)
    first.step(data.batch(0, 4, 32, 0))
    first.save(kept)
    second = make(data, "cuda", precision="bf16", optimizer=optimizer)
    second.restore(*kept.newest())
    grads = {name: torch.full_like(part, 0.01) for name, part in first.model.named_parameters()}
    for trainer in (first, second):  # the same gradients: a backward pass on a GPU may add in another order
        for part, parameter in trainer.model.named_parameters():
            parameter.grad = grads[part].clone()
        trainer.update.apply(1e-3, 1.0)
    ours, theirs = first.update.state(), second.update.state()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_checkpoint_restores_everything(data_folder, tmp_path):
    data = PackedTokens(data_folder)
    kept = Checkpoints(tmp_path)
    first = make(data, "cuda", precision="bf16")
    first.step(data.batch(0, 4, 32, 0))
    first.save(kept)
    second = make(data, "cuda", precision="bf16")
    second.restore(*kept.newest())
    for name, tensor in first.update.state().items():
        assert torch.equal(tensor.cpu(), second.update.state()[name].cpu()), name
    assert first.step(data.batch(1, 4, 32, 0)).loss == second.step(data.batch(1, 4, 32, 0)).loss


def test_the_stage(data_folder, tmp_path):
    spec = Train.read({"model": SHAPE.model_dump(), "batch_size": 8, "seq_len": 64, "steps": 30, "precision": "bf16"})
    made = spec.make(tmp_path / "train-x", {"data": Artifact.read(data_folder)}, Run(device="cuda", quiet=True))
    assert made.figures["val_loss"].value < 5.0


@pytest.mark.parametrize("policy", [KeepAll(), EveryNth(n=1)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp8", marks=FP8)])
def test_peak_memory_is_predicted_within_a_fifth(precision, policy):
    config = Shape(hidden_size=1024, num_layers=8, num_heads=16, num_kv_heads=8, intermediate_size=2816).config(16000)
    draw = np.random.default_rng(0)
    with Window("cuda") as window:
        model = build(config, device="cuda")
        trainer = Trainer(model, steps=9, schedule=Cosine(), activation_checkpointing=policy, precision=precision)
        for _ in range(3):
            tokens = draw.integers(0, 16000, (8, 1024))
            trainer.step(Batch(tokens, tokens, np.zeros((8, 1024), np.int32)))
    dims, dtype = config.dims(), TORCH_NAMES[precision]
    work = Training(dims, 3, 8, 1024, dtype, trainer.segments, adamw(dims), packed=False, fp8=fp8_products(precision))
    assert growth_bytes(work, "cuda").value == pytest.approx(window.memory_growth_bytes, rel=0.2)


def test_packed_rows_learn(data_folder):
    data = PackedTokens(data_folder)
    trainer = make(data, "cuda")
    first = trainer.step(data.batch(0, 8, 64, 0)).loss
    fit(trainer, data, batch_size=8, seq_len=64)
    assert trainer._loss(data.batch(0, 8, 64, 0), 1)[0].item() / (8 * 64) < first
