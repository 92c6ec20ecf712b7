"""Optimizer and master weights in the host's memory: the same training, checkpoints included, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hone.feed.load import PackedTokens
from hone.model.decoder import build
from hone.train import OFFLOADS, OPTIMIZERS, update
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer
from hone.train.offload import states, steps
from hone.train.offload.steps import HostSteps
from hone.train.offload.techniques import Host, Resident
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import assert_same_weights, on_ranks, weights_of
from tests.train.ranks import trained as trained_on_ranks


def make(
    data, offload, *, optimizer="adamw", precision="fp32", accumulation=1, zeros=None, clip=0.5, **more
) -> Trainer:
    torch.manual_seed(0)
    options = {"min_elements": 512} if optimizer == "adamw_8bit" else {}
    return Trainer(
        build(SHAPE.config(data.vocab_size), seed=3),
        steps=6,
        schedule=Cosine(warmup=2),
        optimizer=OPTIMIZERS.read({"kind": optimizer, **options}),
        precision=precision,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=clip,
        zeros=zeros,
        offload=OFFLOADS.read(offload),
        **more,
    )


def trained(trainer, data, steps=range(3)):
    return [trainer.step(data.batch(step, 4, 32, 0)).loss for step in steps]


PLACES = [
    "host",
    {"kind": "host", "gradients": True},
    {"kind": "host", "parameters": True},
    {"kind": "nvme"},
    {"kind": "nvme", "parameters": True},
    {"kind": "nvme", "parameters_on_disk": True},
    {"kind": "nvme", "host_bytes": 400_000},
]


@pytest.mark.parametrize(
    "offload", PLACES, ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one.values()))
)
@pytest.mark.parametrize(
    ("optimizer", "precision", "accumulations"),
    [
        ("adamw", "fp32", (1, 2)),
        ("adamw", "bf16", (1, 2)),
        ("adamw", "fp16", (1,)),
        ("adamw_8bit", "bf16", (2,)),
        ("muon", "bf16", (1,)),
        ("adafactor", "bf16", (1,)),
        ("lion", "bf16", (1,)),
        ("soap", "fp32", (1,)),
    ],
)
def test_the_same_training(offload, optimizer, precision, accumulations, data_folder, monkeypatch):
    """In chunks and windows, so that one weight has several: with the same bits where the optimizer computes each weight alone."""
    monkeypatch.setattr(steps, "CHUNK", 4096)
    monkeypatch.setattr(states, "WINDOW", 1 << 12 if optimizer != "adamw_8bit" else 1 << 20)
    data = PackedTokens(data_folder)
    for accumulation in accumulations:
        options = {"optimizer": optimizer, "precision": precision, "accumulation": accumulation}
        one, other = make(data, "none", **options), make(data, offload, **options)
        ours, theirs = trained(one, data), trained(other, data)
        exact = optimizer in ("adamw", "lion", "adamw_8bit")
        assert ours == theirs if exact else ours == pytest.approx(theirs, abs=1e-6)
        for name, master in one.update.weights.masters.items():
            held = other.update.weights.masters[name]
            parameter = other.update.weights.parameters[name]
            assert held.device.type == "cpu"
            torch.testing.assert_close(held, master.detach(), rtol=0, atol=0 if exact else 1e-6)
            with other.update.weights.whole(name.rpartition(".")[0], wide=False):
                assert held.data_ptr() != parameter.data_ptr()
                assert torch.equal(parameter.detach(), held.to(parameter.dtype)), f"{name} is not its rounded master"
        file = getattr(other.update.weights, "files", None)
        if file is not None:
            read = sum(one.numel() for name, one in file.masters.items() if name not in file.in_memory)
            assert file.file.read_bytes > 3 * 4 * read > 0
            assert bool(file.in_memory) == ("host_bytes" in offload)


def test_several_buckets_in_turn(data_folder, monkeypatch):
    """Two buffers serve many buckets."""
    monkeypatch.setattr("hone.train.update.BUCKET", 4096)
    data = PackedTokens(data_folder)
    one, other = (make(data, kind, precision="bf16") for kind in ("none", "host"))
    assert trained(one, data) == trained(other, data)
    assert len(other.update.weights._order) > 4


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 2), ("bf16", 1)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gradients_scaled_before_they_come(precision, accumulation, optimizer, data_folder, monkeypatch):
    """As a GPU does it: the same bits as scaled on the host, also where they are clipped; those of 16 bits come as they are."""
    monkeypatch.setattr("hone.train.update.BUCKET", 4096)
    data, scaled, wide = PackedTokens(data_folder), [], HostSteps._wide
    one, other = (make(data, "host", precision=precision, accumulation=accumulation, optimizer=optimizer) for _ in "ab")
    one.max_grad_norm = other.max_grad_norm = 0.01
    other.update.weights.scales_there = True
    ours = trained(one, data)
    monkeypatch.setattr(HostSteps, "_wide", lambda self, *given: scaled.append(self._left) or wide(self, *given))
    assert trained(other, data) == ours
    assert (set(scaled) == {1.0}) == ((precision, accumulation) != ("bf16", 1)) and scaled
    for name, master in one.update.weights.masters.items():
        assert torch.equal(other.update.weights.masters[name], master), name


def in_small_buckets(folder: str, out: str, settings: list[dict[str, Any]]) -> tuple[list[list], list[int]]:
    """As `trained_on_ranks`, with buckets of few weights, and the number of buckets of every update on the host."""
    update.BUCKET = 4096
    begin, seen = HostSteps.begin, []

    def counting(self: HostSteps, buckets: Any, factor: Any) -> None:
        seen.append(len(buckets))
        begin(self, buckets, factor)

    HostSteps.begin = counting  # type: ignore[method-assign]
    return trained_on_ranks(folder, out, settings), seen


def test_several_buckets_in_turn_on_ranks(data_folder, tmp_path):
    """In float32, too, masters on the host are not the parameters: the copies of one bucket are beside the step of another."""
    settings: list[dict[str, Any]] = []
    for kind, offload, more in (("zero1", "host", {"widen": True}), ("zero3", "nvme", {})):
        plain = {"model": {"num_layers": 2}, "data_parallel": kind, "precision": "fp32", **more}
        settings += [plain, {**plain, "parallelism": {"offload": offload}}]
    for losses, buckets in on_ranks(2, in_small_buckets, str(data_folder), str(tmp_path), settings):
        assert len(buckets) == 4 and min(buckets) > 4
        assert losses[0] == losses[1] and losses[2] == losses[3]
    for place in (0, 2):
        ours, theirs = weights_of(tmp_path, place + 1, 2), weights_of(tmp_path, place, 2)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_weights(one, other, "adamw")


def test_zeros_stay(data_folder):
    data = PackedTokens(data_folder)
    name = "layers.1.mixer.qkv.weight"
    shape = dict(build(SHAPE.config(data.vocab_size)).named_parameters())[name].shape
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    for optimizer in ("adamw", "muon"):
        trainer = make(data, "host", optimizer=optimizer, precision="bf16", zeros={name: mask})
        trained(trainer, data, range(2))
        for held in (trainer.update.weights.masters[name], trainer.update.weights.parameters[name]):
            assert not held[mask].any() and held[~mask].all()


@pytest.mark.parametrize("kinds", [("none", "host"), ("host", "none"), ("host", "host")])
def test_checkpoints_are_read_by_both(kinds, data_folder, tmp_path):
    data, (before, after) = PackedTokens(data_folder), kinds
    whole = trained(make(data, before, precision="bf16"), data)
    first, kept = make(data, before, precision="bf16"), Checkpoints(tmp_path)
    trained(first, data, range(2))
    first.save(kept)
    second = make(data, after, precision="bf16")
    second.restore(*kept.newest())
    assert trained(second, data, range(2, 3)) == pytest.approx(whole[2:], abs=1e-6)


def test_a_step_that_overflowed_changes_nothing(data_folder):
    data = PackedTokens(data_folder)
    trainer = make(data, "host", precision="fp16")
    trainer.scaler.scale = 2.0**40
    before = {name: part.clone() for name, part in trainer.update.weights.masters.items()}
    assert trainer.step(data.batch(0, 4, 32, 0)).skipped and trainer.scaler.scale == 2.0**39
    assert all(torch.equal(before[name], part) for name, part in trainer.update.weights.masters.items())
    assert not trainer.update.states


def test_a_spec_names_it():
    spec = Train.read({"parallelism": {"offload": "host"}})
    assert spec.parallelism.offload == Host(kind="host")
    assert Train().parallelism.offload == Resident(kind="none")
