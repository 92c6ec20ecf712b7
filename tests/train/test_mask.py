"""Training under a fixed mask: zeros stay zero under every optimizer and precision, and the rest learns as without them."""

from __future__ import annotations

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, SpecError
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.cost.train.update import adamw, masked
from hone.feed.facts import DataFacts
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.model.adapters import ADAPTERS
from hone.model.adapters.peft import adapted
from hone.model.decoder import build
from hone.model.facts import CheckpointFacts
from hone.model.hf import load
from hone.train import OPTIMIZERS
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer, to_device
from hone.train.mask import sparsity, zeros_of
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE

QUIET = Run(quiet=True)
STEPS = {"batch_size": 4, "seq_len": 32, "steps": 4, "optimizer": {"lr": 3e-3}, "checkpoint": {"interval": 3}}


def random_zeros(model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    names = [name for name, part in model.named_parameters() if part.ndim == 2 and name.startswith("layers.")]
    return {name: torch.rand(model.get_parameter(name).shape, generator=generator) < 0.7 for name in names}


def trainer_of(data, zeros, **options) -> Trainer:
    model = build(SHAPE.config(data.vocab_size), seed=3)
    return Trainer(model, steps=6, schedule=Cosine(warmup=1), zeros=zeros, **options)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 2)])
def test_zeros_stay_zero_under_every_optimizer(optimizer, precision, accumulation, data_folder):
    data = PackedTokens(data_folder)
    zeros = random_zeros(build(SHAPE.config(data.vocab_size)))
    chosen = OPTIMIZERS.read({"kind": optimizer, "lr": 3e-3, "weight_decay": 0.1})
    trainer = trainer_of(data, zeros, optimizer=chosen, precision=precision, gradient_accumulation_steps=accumulation)
    before = {name: part.detach().float().clone() for name, part in trainer.model.named_parameters()}
    for step in range(2):
        trainer.step(data.batch(step, 4, 32, 0))
    for name, part in trainer.model.named_parameters():
        mask = zeros.get(name, torch.zeros(part.shape, dtype=torch.bool))
        for weight in (part.detach(), trainer.update.weights.masters[name].detach()):
            assert (weight[mask] == 0).all(), name
        assert (part.detach().float() != before[name])[~mask].float().mean() > 0.3, f"{name} did not train"


def test_a_masked_step_equals_weights_times_mask(data_folder):
    """The oracle: free weights times a constant mask in the forward pass, torch's AdamW on the free weights."""
    data = PackedTokens(data_folder)
    zeros = random_zeros(build(SHAPE.config(data.vocab_size)))
    trainer = trainer_of(data, zeros, optimizer=OPTIMIZERS.read({"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1}))
    naive = build(SHAPE.config(data.vocab_size), seed=3)
    free = {name: part.detach().clone().requires_grad_() for name, part in naive.named_parameters()}
    groups = [[part for name, part in free.items() if (part.ndim >= 2) is wide] for wide in (True, False)]
    peer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step in range(4):
        batch = data.batch(step, 4, 32, 0)
        ours = trainer.step(batch)
        tokens, targets, context = to_device(batch, torch.device("cpu"))
        used = {name: part.masked_fill(zeros[name], 0) if name in zeros else part for name, part in free.items()}
        logits = torch.func.functional_call(naive, used, (tokens, context))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*free.values()], 1.0)
        for group in peer.param_groups:
            group["lr"] = 3e-3 * Cosine(warmup=1).share(step, 6)
        peer.step()
        peer.zero_grad()
        assert ours.loss == pytest.approx(loss.item(), abs=1e-5)
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-4), "a masked weight's gradient counts"


@pytest.fixture(scope="module")
def line(data_folder, tmp_path_factory):
    """An early model, and a mask from a pruner."""
    folder = tmp_path_factory.mktemp("line")
    data = {"data": Artifact.read(data_folder)}
    early = Train.read({**STEPS, "model": SHAPE.model_dump()}).make(folder / "train-early", data, QUIET)
    pruned = Compress.read({"steps": [{"kind": "magnitude", "sparsity": 0.8}]})
    return data, early, pruned.make(folder / "compress-mask", {"model": early}, QUIET)


def test_a_stage_trains_an_early_model_under_the_mask_of_another(line, tmp_path):
    data, early, mask = line
    made = Train.read(STEPS).make(tmp_path / "train-ticket", {**data, "model": early, "mask": mask}, QUIET)
    zeros = zeros_of(mask.folder, "cpu")
    assert sparsity(zeros) == pytest.approx(0.8, abs=1e-3) == made.figures["sparsity"].value
    assert zeros_of(made.folder, "cpu").keys() == zeros.keys()
    for name, found in zeros_of(made.folder, "cpu").items():
        assert torch.equal(found, zeros[name])
    start, end = load(early.folder), load(made.folder)
    assert not torch.equal(start.embedding, end.embedding) and (end.embedding != 0).all()
    free = Train.read(STEPS).make(tmp_path / "train-free", {**data, "model": early}, QUIET)
    growth = [one.figures["memory_growth_bytes"].estimate.value for one in (made, free)]
    assert growth[0] >= growth[1]


def test_a_restored_training_goes_on_under_the_mask(data_folder, tmp_path):
    data = PackedTokens(data_folder)
    zeros = random_zeros(build(SHAPE.config(data.vocab_size)))
    whole, begun, resumed = (trainer_of(data, zeros, optimizer=OPTIMIZERS.read("muon")) for _ in range(3))
    for step in range(4):
        whole.step(data.batch(step, 4, 32, 0))
    for step in range(2):
        begun.step(data.batch(step, 4, 32, 0))
    begun.save(Checkpoints(tmp_path))
    resumed.restore(*Checkpoints(tmp_path).newest())
    for step in range(2, 4):
        resumed.step(data.batch(step, 4, 32, 0))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(one, other)


def test_masks_that_are_none_are_refused(line, tmp_path):
    data, early, mask = line
    facts = {"data": DataFacts.of(data["data"].folder), "model": CheckpointFacts.of(early.folder)}
    pruned = CheckpointFacts.of(mask.folder)
    spec = Train.read(STEPS)
    packed = pruned.model_copy(update={"quantization": {"quant_method": "compressed-tensors"}})
    with pytest.raises(SpecError, match="quantized weights, whose zeros"):
        spec.plan({**facts, "mask": packed}, describe())
    adapter = ADAPTERS.read({"kind": "lora", "rank": 2, "target_modules": ["o_proj"]})
    corrected = pruned.model_copy(update={"config": adapted(pruned.config, adapter)})
    with pytest.raises(SpecError, match="has adapters around its linears, and a mask"):
        spec.plan({**facts, "mask": corrected}, describe())
    shallow = pruned.model_copy(
        update={"config": pruned.config.model_copy(update={"layers": pruned.config.layers[:2]})}
    )
    with pytest.raises(SpecError, match="other layers than the model that is trained"):
        spec.plan({**facts, "mask": shallow}, describe())
    with pytest.raises(ArtifactError, match="no weight of a layer's linear is zero"):
        spec.make(tmp_path / "train-x", {**data, "model": early, "mask": early}, QUIET)


def test_masks_have_a_cost():
    dims = SHAPE.config(300).dims()
    plain = adamw(dims)
    more = masked(plain, dims)
    assert more.moved_bytes > plain.moved_bytes and more.state_bytes == plain.state_bytes
    assert more.work_bytes >= dims.num_params - 300 * dims.hidden_size - 10 * dims.hidden_size
