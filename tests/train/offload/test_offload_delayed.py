"""Delayed updates: the gradient of a step moves weights that the next step does not see yet."""

from __future__ import annotations

import pytest
import torch

from hone.base.errors import SpecError
from hone.feed.load import PackedTokens
from hone.train import ACTIVATION_CHECKPOINTINGS, OPTIMIZERS
from hone.train.checkpoint import Checkpoints
from hone.train.objectives.preference.measure import validate
from hone.train.offload.techniques import Host
from hone.train.passes import cut, run_layers, shrink, to_device
from hone.train.stage import Train
from tests.train.offload.test_offload import make, trained

DELAYED = {"kind": "host", "delayed_update": True, "delayed_update_after": 2}
ALL = range(6)


def reference(data: PackedTokens, steps: int, after: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A plain loop of the definition: (losses, weights) of w[k] = update(w[k - 1], g[k]), where g[k] is that of w[k - 2], or before
    `after` updates of w[k - 1]. Weights and gradients are float32, AdamW is written out."""
    plain = make(data, "none")
    model, rate = plain.model, plain.schedule
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    used, losses = {name: one.clone() for name, one in weights.items()}, []
    first = {name: torch.zeros_like(one) for name, one in weights.items()}
    second = {name: torch.zeros_like(one) for name, one in weights.items()}
    for step in range(steps):
        for name, one in model.named_parameters():
            one.data.copy_(used[name])
            one.grad = None
        batch = data.batch(step, 4, 32, 0)
        tokens, targets, context = to_device(cut(batch, 1)[0], torch.device("cpu"))
        loss = plain._objective(run_layers(model, tokens, context, plain.segments), tokens, targets, context)
        count = plain.objective.count(batch.targets)
        (loss / count).backward()
        losses.append(loss.item() / count)
        grads = {name: one.grad for name, one in model.named_parameters()}
        norm = torch.sqrt(sum(one.double().square().sum() for one in grads.values())).item()
        factor, lr = shrink(norm, 0.5), 1e-3 * rate.share(step, 6)
        if step > after:  # the weights that the step before made are due
            used = {name: one.clone() for name, one in weights.items()}
        for name, grad in grads.items():
            grad = grad * factor
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            mean, square = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.95 ** (step + 1))
            decay = 0.1 if grad.ndim > 1 else 0.0
            weights[name] = weights[name] * (1 - lr * decay) - lr * mean / (square.sqrt() + 1e-5)
        if step < after or step + 1 == 6:
            used = {name: one.clone() for name, one in weights.items()}
    return losses, weights


@pytest.mark.parametrize("more", [{}, {"parameters": True}])
def test_its_definition(more, data_folder):
    """Against a plain loop, with the first two updates in time; after the last step the weights are the newest."""
    data = PackedTokens(data_folder)
    trainer = make(data, {**DELAYED, **more})
    trainer.update.groups = OPTIMIZERS.read({"kind": "adamw", "eps": 1e-5}).groups(trainer.update.parameters)
    losses, weights = reference(data, 6, after=2)
    assert trained(trainer, data, ALL) == pytest.approx(losses, abs=1e-5)
    for name, master in trainer.update.weights.masters.items():
        torch.testing.assert_close(master, weights[name], rtol=0, atol=2e-5)
        with trainer.update.weights.whole(name.rpartition(".")[0], wide=False):
            assert torch.equal(trainer.update.weights.parameters[name].detach(), master)


def test_it_is_another_training(data_folder):
    data = PackedTokens(data_folder)
    in_time, late = trained(make(data, "none"), data, ALL), trained(make(data, DELAYED), data, ALL)
    assert late[:3] == in_time[:3] and all(one != other for one, other in zip(late[3:], in_time[3:], strict=True))
    never = {**DELAYED, "delayed_update_after": 6}
    assert trained(make(data, never), data, ALL) == in_time
    assert Host(kind="host").exact and not Host(kind="host", delayed_update=True).exact


@pytest.mark.parametrize("more", [{}, {"parameters": True}, {"kind": "nvme", "parameters_on_disk": True}])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_checkpoint_goes_on_with_the_same_bits(more, stop, data_folder, tmp_path):
    """It has the weights that the next step computes with beside the masters that the delayed update makes."""
    data, kept, offload = PackedTokens(data_folder), Checkpoints(tmp_path), {**DELAYED, **more}
    whole = make(data, offload, precision="bf16")
    losses = trained(whole, data, ALL)
    first = make(data, offload, precision="bf16")
    trained(first, data, range(stop))
    first.save(kept)
    labels = kept.newest()[0].labels
    assert any(one.startswith("delayed.") for one in labels) == (stop > 2)
    second = make(data, offload, precision="bf16")
    second.restore(*kept.newest())
    assert trained(second, data, range(stop, 6)) == losses[stop:]
    for name, master in whole.update.weights.masters.items():
        assert torch.equal(second.update.weights.masters[name], master)
    # In the same trainer too, as after a spike.
    first.restore(*kept.newest())
    assert trained(first, data, range(stop, 6)) == losses[stop:]


def test_a_step_that_overflowed_brings_the_one_before(data_folder):
    data = PackedTokens(data_folder)
    trainer = make(data, {**DELAYED, "delayed_update_after": 0}, precision="fp16")
    trainer.scaler.scale = 2.0**10
    trained(trainer, data, range(2))
    assert trainer.update.weights.delayed()
    trainer.scaler.scale = 2.0**40
    assert trainer.step(data.batch(2, 4, 32, 0)).skipped and not trainer.update.weights.delayed()
    for name, master in trainer.update.weights.masters.items():
        assert torch.equal(trainer.update.weights.parameters[name].detach(), master.half())


def test_an_error_of_the_update_is_an_error_of_the_next_step(data_folder, monkeypatch):
    data = PackedTokens(data_folder)
    trainer = make(data, {**DELAYED, "delayed_update_after": 0})

    def broken(*_: object) -> None:
        raise SpecError("broken", fix="mend it")

    monkeypatch.setattr(trainer.update, "_apply", broken)
    trained(trainer, data, range(1))
    with pytest.raises(SpecError, match="broken"):
        trained(trainer, data, range(1, 2))


def test_early_stopping_is_refused():
    late = {"parallelism": {"offload": DELAYED}}
    assert Train.read(late).parallelism.offload.delayed_update
    with pytest.raises(SpecError, match="delayed_update"):
        Train.read({**late, "early_stopping": {"max_time_s": 60}})


def test_it_is_part_of_the_identity():
    """Other than the places, which change nothing."""
    plain, late = Train(), Train.read({"parallelism": {"offload": DELAYED}})
    host = Train.read({"parallelism": {"offload": {"kind": "nvme", "parameters": True}}})
    assert plain.identity() == host.identity() != late.identity()


@pytest.mark.parametrize("place", [{"kind": "host", "parameters": True}, {"kind": "nvme", "parameters_on_disk": True}])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_layers_that_come_and_go(kind, place, data_folder):
    """Recomputed layers, several passes and evaluations: the losses of the training on the device."""
    data = PackedTokens(data_folder)
    more = {"activation_checkpointing": ACTIVATION_CHECKPOINTINGS.read(kind), "accumulation": 2}
    one, other = make(data, "none", **more), make(data, place, **more)
    assert trained(one, data) == trained(other, data)
    sizes = {"batch_size": 4, "seq_len": 32}
    assert validate(one.model, data, **sizes) == validate(other.model, data, **sizes)
    stream = other.update.weights.layers
    assert not any(layer.there for layer in stream.layers)
    assert all(layer.flat.untyped_storage().size() == 0 for layer in stream.layers)
    assert trained(one, data, range(3, 4)) == trained(other, data, range(3, 4))


def test_two_layers_are_there_at_a_time(data_folder):
    data = PackedTokens(data_folder)
    trainer = make(data, {"kind": "host", "parameters": True})
    stream, most = trainer.update.weights.layers, 0
    bring = stream.bring

    def counted(index: int, following: int) -> None:
        nonlocal most
        bring(index, following)
        most = max(most, sum(layer.there for layer in stream.layers))

    stream.bring = counted
    trained(trainer, data, range(2))
    assert most == 2
