"""Training in fp8: it follows bf16, its gradients are those of the definition, and nothing of it is in a checkpoint."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.cost.activations.segments import layer_bytes
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.model.linear import Dense
from hone.ops.fp8 import api, factors
from hone.ops.fp8.recipes import RECIPES
from hone.train import FP8_PRECISIONS
from hone.train.activation_checkpointing.selective import Selective
from hone.train.activation_checkpointing.uniform import EveryNth
from hone.train.checkpoint import Checkpoints
from hone.train.faults.rerun import bits_of, check_replicas
from hone.train.fp8.fits import check_passes, fp8_notes, fp8_parameters, fp8_products, in_fp8
from hone.train.fp8.linears import Fp8Dense, Fp8Experts
from hone.train.fp8.techniques import FP8
from hone.train.loop import Trainer
from hone.train.objectives.preference.measure import validate
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.precision import FP8_RECIPES, Precision
from hone.train.ranks import Ranks
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE

TWO = SHAPE.model_copy(update={"num_layers": 2})
SEQ = 32


def make(data: PackedTokens, precision: str, **options) -> Trainer:
    model = build(TWO.config(data.vocab_size), seed=3)
    how = {"steps": 20, "schedule": Cosine(warmup=2), "optimizer": AdamW(lr=3e-3), **options}
    return Trainer(model, precision=precision, **how)


PRECISIONS = ["fp8", "fp8_tensorwise", "fp8_rowwise_with_gw_hp", "fp8_blockwise"]


def test_each_precision_is_a_technique_with_its_recipe():
    assert set(FP8_RECIPES) == set(PRECISIONS) == set(get_args(Precision)) - {"fp32", "bf16", "fp16"}
    assert {FP8_PRECISIONS[name].recipe for name in FP8_RECIPES} == set(RECIPES)
    assert {name: FP8_PRECISIONS[name] for name in FP8_PRECISIONS} == FP8
    for name, recipe in FP8_RECIPES.items():
        assert FP8_PRECISIONS[name].recipe == recipe
        assert ("weight_gradient" in fp8_products(name)) == RECIPES[recipe].weight_gradient


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_follows_bf16(precision, data_folder):
    """Losses fall from 5.69 to about 3.5 in these steps; eight bits in place of bf16 move them by less than 1 %."""
    data = PackedTokens(data_folder)
    exact, other = make(data, "bf16"), make(data, precision)
    losses = []
    for step in range(14):
        batch = data.batch(step, 8, SEQ, 0)
        losses.append((exact.step(batch).loss, other.step(batch).loss))
    assert losses[0][0] == pytest.approx(losses[0][1], rel=2e-3) and losses[0][0] != losses[0][1]
    assert losses[-1][0] < losses[0][0] - 1.5
    assert losses[-1][0] == pytest.approx(losses[-1][1], rel=2e-2)


def gradients(trainer: Trainer, batch) -> dict[str, torch.Tensor]:
    trainer.gradients(batch)
    return {name: trainer.update.weights.grad(name).clone() for name in trainer.update.weights.parameters}


def test_fp8_gradients_are_near_those_of_bf16(data_folder):
    data = PackedTokens(data_folder)
    batch = data.batch(0, 4, SEQ, 0)
    exact, coded = make(data, "bf16"), make(data, "fp8")
    own = {name for name, part in coded.model.named_modules() if type(part) is Fp8Dense}
    assert own == {
        f"layers.{index}.{path}"
        for index in range(2)
        for path in ("mixer.qkv", "mixer.out", "feed_forward.gate_up", "feed_forward.down")
    }
    assert type(coded.model.lm_head) in (Dense, type(None))
    one, other = gradients(exact, batch), gradients(coded, batch)
    for name, wanted in one.items():
        error = ((other[name].float() - wanted.float()).norm() / wanted.float().norm()).item()
        assert 0 < error < 0.15, (name, error)


@pytest.mark.parametrize("policy", [EveryNth(n=1), Selective()], ids=["every_nth", "selective"])
def test_recomputed_layers_give_the_same_bits(policy, data_folder):
    data = PackedTokens(data_folder)
    batch = data.batch(0, 4, SEQ, 0)
    one = gradients(make(data, "fp8"), batch)
    other = gradients(make(data, "fp8", activation_checkpointing=policy), batch)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_micro_batches_share_one_cast_of_the_weights(data_folder, monkeypatch):
    data = PackedTokens(data_folder)
    trainer, counted = make(data, "fp8", gradient_accumulation_steps=4), []
    cast = api.cast

    def counting(x, *args, **options):
        counted.append(x)
        return cast(x, *args, **options)

    monkeypatch.setattr(api, "cast", counting)
    monkeypatch.setattr(factors, "cast", counting)
    trainer.step(data.batch(0, 8, SEQ, 0))
    weights = [linear.weight for linear in trainer.linears.linears]
    assert sum(any(one is weight for weight in weights) for one in counted) == len(weights) == 8
    assert len(counted) == 8 + 4 * 2 * 8  # and two casts of each linear in each micro-batch: x and its gradient
    # Four parts give the gradient of the whole, but that a scale of a column is one of fewer rows, and sums are other.
    whole, parts = (
        gradients(make(data, "fp8", gradient_accumulation_steps=n), data.batch(1, 8, SEQ, 0)) for n in (1, 4)
    )
    for name, wanted in whole.items():
        assert ((parts[name].float() - wanted.float()).norm() / wanted.float().norm()).item() < 0.1, name


@pytest.mark.parametrize("reader", ["cast", "replicas"])
def test_readers_of_weights_wait_for_transfers(reader, data_folder):
    """On a GPU an update ends before other ranks' weights are there, for which layers wait when they compute."""
    ranks = Ranks(Mesh(), Parallelism().grid(Mesh(), "cpu"))
    trainer = make(PackedTokens(data_folder), "fp8", gradient_accumulation_steps=2, ranks=ranks)
    buckets = [bucket for layer in trainer.update.weights._layers for bucket in layer]
    wanted = [bits_of(bucket.weights) for bucket in buckets]
    for bucket in buckets:
        arrives = partial(bucket.weights.copy_, bucket.weights.clone())
        bucket._gathering = SimpleNamespace(wait=arrives)
        bucket.weights.zero_()
    assert [bits_of(bucket.weights) for bucket in buckets] != wanted
    if reader == "cast":
        trainer.linears.begin(trainer.update.weights, trainer.done)
        linear = trainer.linears.linears[0]
        assert torch.equal(linear.held.codes, factors.weight_codes(linear.weight, linear.recipe).codes)
    else:
        assert check_replicas(trainer) == ""
    assert [bits_of(bucket.weights) for bucket in buckets] == wanted


@pytest.mark.parametrize("parts", [1, 2])
def test_a_resumed_training_is_the_same_to_the_bit(parts, data_folder, tmp_path):
    data = PackedTokens(data_folder)
    whole, first = (make(data, "fp8", gradient_accumulation_steps=parts) for _ in range(2))
    for step in range(4):
        whole.step(data.batch(step, 4, SEQ, 0))
    for step in range(2):
        first.step(data.batch(step, 4, SEQ, 0))
    kept = Checkpoints(tmp_path)
    first.save(kept)
    kept.finish()
    second = make(data, "fp8", gradient_accumulation_steps=parts)
    second.restore(*kept.newest())
    for step in range(2, 4):
        second.step(data.batch(step, 4, SEQ, 0))
    one, other = whole.update.state(), second.update.state()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_and_evaluations_are_those_of_bf16(data_folder, tmp_path):
    """A bf16 training reads an fp8 one's checkpoint, and its weights have the same validation loss, to the bit."""
    data = PackedTokens(data_folder)
    coded, plain = make(data, "fp8"), make(data, "bf16")
    for step in range(2):
        coded.step(data.batch(step, 4, SEQ, 0))
    kept = Checkpoints(tmp_path)
    coded.save(kept)
    kept.finish()
    plain.restore(*kept.newest())
    one, other = coded.update.state(), plain.update.state()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
    assert coded.model.state_dict().keys() == plain.model.state_dict().keys()
    sizes = {"batch_size": 4, "seq_len": SEQ, "num_sequences": 4}
    assert validate(coded.model, data, **sizes) == validate(plain.model, data, **sizes)


def test_a_compiled_layer_gives_the_same_loss(data_folder):
    """Through graphs, without their compiler: of the first and of later steps, with held codes."""
    data = PackedTokens(data_folder)
    eager, graphs = (make(data, "fp8", gradient_accumulation_steps=2) for _ in range(2))
    for layer in graphs.model.layers:
        layer.compile(dynamic=False, backend="aot_eager", fullgraph=True)
    for step in range(3):
        batch = data.batch(step, 4, SEQ, 0)
        assert eager.step(batch).loss == pytest.approx(graphs.step(batch).loss, rel=1e-3)


SPEC = {"precision": "fp8", "batch_size": 8, "seq_len": 64, "model": {"hidden_size": 48, "intermediate_size": 96}}


def test_what_it_does_not_work_with():
    spec = Train.read({**SPEC, "seq_len": 15, "batch_size": 2})
    with pytest.raises(SpecError, match="a pass of a rank has 15 tokens"):
        check_passes(spec, TWO.config(300), 2)
    check_passes(spec.model_copy(update={"precision": "bf16"}), TWO.config(300), 2)


def test_models_without_fp8_linears_are_refused():
    odd = TWO.model_copy(update={"hidden_size": 40, "num_heads": 4, "head_dim": 10, "intermediate_size": 96})
    with pytest.raises(SpecError, match="no linear of the layers") as error:
        check_passes(Train.read(SPEC), odd.config(300), 1)
    assert "model.hidden_size" in error.value.fix
    mixed = TWO.model_copy(update={"num_heads": 3, "num_kv_heads": 1, "head_dim": 8}).config(300)
    left = [path for path in mixed.linears(0) if path not in in_fp8(mixed, 0, "fp8")]
    (note,) = fp8_notes("fp8", mixed)
    assert left and all(path in note for path in left) and "bf16" in note
    assert 0 < fp8_parameters(mixed, "fp8") < mixed.num_params
    assert fp8_notes("bf16", mixed) == ()


EXPERTS = {"kind": "moe", "num_experts": 4, "intermediate_size": 32, "balance": ["bias"]}


@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise_with_gw_hp"])
def test_experts_follow_bf16(precision, data_folder):
    """As `test_it_follows_bf16`; routers stay in float32, and a pass's rows of one expert are any number."""
    data = PackedTokens(data_folder)
    config = TWO.model_copy(update={"feed_forward": (EXPERTS,)}).config(data.vocab_size)
    how = {"steps": 20, "schedule": Cosine(warmup=2)}
    exact, other = (
        Trainer(build(config, seed=3), precision=one, optimizer=AdamW(lr=3e-3), **how) for one in ("bf16", precision)
    )
    assert {"feed_forward.gate_up", "feed_forward.down"} <= set(in_fp8(config, 0, precision))
    assert [type(layer.feed_forward.down) for layer in other.model.layers] == [Fp8Experts] * 2
    losses = []
    for step in range(14):
        batch = data.batch(step, 8, SEQ, 0)
        losses.append((exact.step(batch).loss, other.step(batch).loss))
    assert losses[0][0] == pytest.approx(losses[0][1], rel=2e-3) and losses[0][0] != losses[0][1]
    assert losses[-1][0] < losses[0][0] - 1.5
    assert losses[-1][0] == pytest.approx(losses[-1][1], rel=2e-2)


def test_experts_are_in_fp8_with_scales_of_rows_alone():
    config = TWO.model_copy(update={"feed_forward": (EXPERTS,)}).config(300)
    (note,) = fp8_notes("fp8_tensorwise", config)
    assert "feed_forward.gate_up" in note and "feed_forward.gate_up" not in fp8_notes("fp8", config)[0]
    of_experts = sum(4 * one.out_features * one.in_features for one in config.linears(0).values() if one.experts)
    assert fp8_parameters(config, "fp8") - fp8_parameters(config, "fp8_tensorwise") == 2 * of_experts


def test_the_stage_says_what_it_computes_and_saves_what_bf16_saves(data_folder, tmp_path):
    data, folders = {"data": Artifact.read(data_folder)}, {}
    spec = {"batch_size": 4, "seq_len": SEQ, "steps": 2, "validation": {"sequences": 4}, "model": TWO.model_dump()}
    facts, machine = {"data": facts_of(data["data"])}, describe("cpu")
    notes = {name: Train.read({**spec, "precision": name}).plan(facts, machine).notes for name in ("bf16", "fp8")}
    assert any(note.startswith("fp8: products of the layers' linears") for note in notes["fp8"])
    assert not any("fp8" in note for note in notes["bf16"])
    for name in ("bf16", "fp8"):
        made = Train.read({**spec, "precision": name}).make(tmp_path / f"train-{name}", data, Run(quiet=True))
        folders[name] = made.folder
        assert "fp8 products" in made.figures["time_s"].estimate.formula or name == "bf16"
    plain, coded = (load_file(folder / "model.safetensors") for folder in folders.values())
    assert plain.keys() == coded.keys() and any(not torch.equal(plain[name], coded[name]) for name in plain)
    assert {tensor.dtype for tensor in coded.values()} == {torch.bfloat16}
    assert (folders["fp8"] / "config.json").read_text() == (folders["bf16"] / "config.json").read_text()


def test_lossy_data_parallelism_refuses_it():
    with pytest.raises(SpecError, match="powersgd works in bf16, fp32, not in fp8"):
        Train.read({**SPEC, "parallelism": {"data_parallel": {"kind": "powersgd"}}})


def saved_bytes(model, batch) -> int:
    """Bytes that a pass keeps for its backward pass, of storages other than the weights'."""
    from hone.train.activation_checkpointing import KeepAll
    from hone.train.passes import run_layers, to_device

    weights = {part.untyped_storage().data_ptr() for part in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, _, context = to_device(batch, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = run_layers(model, tokens, context, KeepAll().segments(len(model.layers)))
    assert x.requires_grad  # the graph keeps all found until here
    return sum(found.values())


@pytest.mark.parametrize("precision", ["fp8", "fp8_blockwise"])
def test_kept_bytes_are_fewer_as_estimated(precision, data_folder):
    """By how much a pass keeps less than in bf16: the estimate's difference, layer by layer."""
    data = PackedTokens(data_folder)
    batch = data.batch(0, 8, SEQ, 0)
    batch = batch._replace(document_ids=np.zeros_like(batch.document_ids))
    plain, coded = (make(data, name) for name in ("bf16", precision))
    dims = plain.model.config.dims()
    less = sum(
        layer_bytes(one, dims.hidden_size, 8 * SEQ, 2, 0).saved
        - layer_bytes(one, dims.hidden_size, 8 * SEQ, 2, 0, fp8=1 + 4 / 128 if "block" in precision else 1).saved
        for one in dims.layers
    )
    measured = saved_bytes(plain.model, batch) - saved_bytes(coded.model, batch)
    assert less > 0 and measured == pytest.approx(less, rel=0.15)
