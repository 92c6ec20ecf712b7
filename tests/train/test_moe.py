"""Training models with experts: micro-batches, recomputation, balance, the bias, resumed bit for bit, and layouts that refuse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.durable import read_jsonl
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.eval.stage import Eval
from hone.feed.load import PackedTokens
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.model.hf import load
from hone.train import ACTIVATION_CHECKPOINTINGS, CONTEXT_PARALLEL, OPTIMIZERS
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer
from hone.train.parallelism import Parallelism
from hone.train.routing.loads import LayerLoads, Loads
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from hone.train.student import from_teacher
from hone.train.weights import describe_parameters
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import assert_same_weights, on_ranks, weights_of
from tests.train.ranks import trained

SOFTMAX = {"kind": "moe", "num_experts": 4, "intermediate_size": 32}
SIGMOID = {**SOFTMAX, "router": "sigmoid", "num_shared_experts": 1, "balance": ["bias", "sequence_loss"]}
SWITCH = {**SOFTMAX, "router": "switch", "capacity_factor": 1.25, "jitter": 0.01, "balance": ["aux_loss", "z_loss"]}
GSHARD = {**SOFTMAX, "router": "gshard", "capacity_factor": 1.0, "balance": ["aux_loss"]}
GPT_OSS = {**SOFTMAX, "biases": True, "swiglu_limit": 0.5}


def make(data: PackedTokens, moe: dict[str, Any], optimizer: str = "adamw", **options: Any) -> Trainer:
    shape = SHAPE.model_copy(update={"num_layers": 2, "feed_forward": (moe,)})
    model = build(shape.config(data.vocab_size), seed=3)
    given = {"lr": 3e-3, **({"eps": 1e-5} if optimizer in ("adamw", "muon") else {})}
    made = OPTIMIZERS.read({"kind": optimizer, **given})
    return Trainer(model, **{"steps": 6, "schedule": Cosine(warmup=1), "optimizer": made, **options})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("moe", [SOFTMAX, {**SOFTMAX, "router": "sigmoid", "balance": ["bias"]}])
def test_micro_batches_equal_one_big_batch(data_folder: Path, moe: dict[str, Any], precision: Any) -> None:
    data = PackedTokens(data_folder)
    whole, parts = (make(data, moe, precision=precision, gradient_accumulation_steps=count) for count in (1, 4))
    tolerance = 1e-5 if precision == "fp32" else 5e-2  # a near tie in the choice of an expert falls either way in bf16
    for step in range(3):
        batch = data.batch(step, 8, 48, 0)
        one, other = whole.step(batch), parts.step(batch)
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        if precision == "fp32":
            assert one.loads.layers[0].experts == other.loads.layers[0].experts
        assert sum(one.loads.layers[1].experts) == 2 * 8 * 48
    if precision == "fp32":
        for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("moe", [SIGMOID, SWITCH, GSHARD], ids=["sigmoid", "switch", "gshard"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_pass_that_is_run_again_draws_and_counts_the_same(
    data_folder: Path, moe: dict[str, Any], policy: str
) -> None:
    data = PackedTokens(data_folder)
    plain = make(data, moe)
    again = make(data, moe, activation_checkpointing=ACTIVATION_CHECKPOINTINGS.read(policy))
    for step in range(3):
        batch = data.batch(step, 4, 48, 0)
        one, other = plain.step(batch), again.step(batch)
        assert (one.loss, one.extra_loss, one.loads) == (other.loss, other.extra_loss, other.loads)
    for one, other in zip(plain.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
def test_every_optimizer_trains_stacks_of_experts(data_folder: Path, optimizer: str) -> None:
    data = PackedTokens(data_folder)
    trainer = make(data, SIGMOID, optimizer)
    before = trainer.model.layers[0].feed_forward.gate_up.weight.detach().clone()
    losses = [trainer.step(data.batch(0, 8, 48, 0)).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    assert not torch.equal(trainer.model.layers[0].feed_forward.gate_up.weight, before)


def test_biases_of_experts_and_sinks_do_not_decay(data_folder: Path) -> None:
    shape = SHAPE.model_copy(update={"family": "gpt_oss", "num_layers": 1, "feed_forward": (GPT_OSS,)})
    described = describe_parameters(build(shape.config(64)))
    groups = OPTIMIZERS.read({"kind": "adamw"}).groups(described)
    fixed = {name for group in groups if not group.weight_decay for name in group.names}
    assert {"layers.0.mixer.sinks", "layers.0.feed_forward.down.bias", "layers.0.feed_forward.router.bias"} <= fixed
    assert not any(name.endswith("feed_forward.down.weight") for name in fixed)


def test_muon_steps_each_expert_on_its_own(data_folder: Path) -> None:
    """A stack's step is that of its matrices one by one."""
    from hone.train.optimizers.base import Entry, Parameter
    from hone.train.optimizers.muon import MuonRule

    rule = MuonRule(0.95, True, 5, "match_rms_adamw")
    draw = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(3, 8, 6, generator=draw) for _ in range(2))
    stack, pieces = weight.clone(), (4, 4)

    def step(one: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        described = Parameter("matrix", tuple(one.shape), pieces)
        entry = Entry(one, gradient.clone(), rule.start(one, described), described, None)
        rule.step([entry], count=1, lr=0.1, weight_decay=0.1)
        return one

    step(stack, grad)
    for index in range(3):
        torch.testing.assert_close(stack[index], step(weight[index].clone(), grad[index]))


@pytest.mark.parametrize("moe", [SIGMOID, SWITCH, GSHARD], ids=["sigmoid", "switch", "gshard"])
def test_a_resumed_training_ends_bit_for_bit(data_folder: Path, tmp_path: Path, moe: dict[str, Any]) -> None:
    data = PackedTokens(data_folder)
    whole, other = (make(data, moe, gradient_accumulation_steps=2) for _ in range(2))
    for step in range(6):
        if step == 3:
            checkpoints = Checkpoints(tmp_path)
            whole.save(checkpoints)
            checkpoints.finish()
        whole.step(data.batch(step, 4, 48, 0))
    torch.manual_seed(99)  # nothing random may come from torch's own state
    found = Checkpoints(tmp_path).newest(lambda line: None)
    assert found is not None
    other.restore(*found)
    assert other.done == 3 and (other.routing.state().keys() == {"0", "1"}) == (moe is SIGMOID)
    for step in range(3, 6):
        other.step(data.batch(step, 4, 48, 0))
    for (path, one), two in zip(whole.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two), path


def test_a_loss_balances_a_skewed_router(data_folder: Path) -> None:
    data, found = PackedTokens(data_folder), []
    for balance in ([], [{"kind": "aux_loss", "weight": 0.1}]):
        trainer = make(data, {**SOFTMAX, "balance": balance}, steps=25)
        for layer in trainer.model.layers:  # the normed stream has a mean: nearly all tokens choose one alike
            layer.feed_forward.router.weight.data[:2] += torch.tensor([[0.3], [-0.3]])
        loads = [trainer.step(data.batch(step, 8, 48, 0)).row()["expert_load"] for step in range(25)]
        found.append(sum(loads[-5:]) / 5)
    assert found[1] < 0.85 * found[0], found


def test_the_bias_moves_once_a_step_by_the_whole_batch(data_folder: Path) -> None:
    data = PackedTokens(data_folder)
    trainer = make(data, {**SIGMOID, "balance": [{"kind": "bias", "rate": 0.5}]}, gradient_accumulation_steps=4)
    step = trainer.step(data.batch(0, 8, 48, 0))
    for index, layer in enumerate(trainer.model.layers):
        loads = np.array(step.loads.layers[index].experts)
        expected = torch.tensor(0.5 * np.sign(loads.mean() - loads), dtype=torch.float32)
        assert torch.equal(layer.feed_forward.router_bias, expected)
        assert not layer.feed_forward.router_bias.requires_grad


def test_a_student_of_experts_does_not_train_the_bias(data_folder: Path) -> None:
    teacher = make(PackedTokens(data_folder), SIGMOID).model
    student = from_teacher(teacher, 2)
    assert [name for name, one in student.named_parameters() if not one.requires_grad] == [
        "layers.0.feed_forward.router_bias"
    ]


def test_figures_of_a_step() -> None:
    layers = {0: LayerLoads([6.0, 2.0], 1.0, 4 * math.log(2), 4.0), 2: LayerLoads([4.0, 4.0], 3.0, 0.0, 4.0)}
    row = Loads(layers, whole=False).row()
    assert row == {"expert_load": 1.5, "expert_drops": 0.25, "router_entropy": pytest.approx(math.log(2) / 2)}
    assert Loads(layers, whole=True).row()["expert_loads"] == {"0": [6, 2], "2": [4, 4]}


def test_the_stage_logs_loads_and_its_folder_is_evaluated(data_folder: Path, tmp_path: Path) -> None:
    model = {**SHAPE.model_dump(), "num_layers": 2, "feed_forward": [SIGMOID]}
    sizes = {"batch_size": 4, "seq_len": 32, "steps": 6}
    spec, data = Train.read({"model": model, **sizes}), {"data": Artifact.read(data_folder)}
    plan = spec.plan({role: facts_of(one) for role, one in data.items()}, describe("cpu"))
    config = spec.model.config(300, eos=0)
    assert any(
        f"a token uses {config.active_params:,} of {config.num_params:,} parameters" in one for one in plan.notes
    )
    made = spec.make(tmp_path / "train-moe", data, Run(quiet=True))
    assert made.figures["num_params"].value == config.num_params == made.figures["num_params"].estimate.value
    rows = [row for row in read_jsonl(made.folder / "steps.jsonl") if "loss" in row]
    assert all(1 <= row["expert_load"] <= 2 and row["expert_drops"] == 0 for row in rows)
    assert all(sum(counts) == 2 * 4 * 32 for counts in rows[-1]["expert_loads"].values())
    bias = load(made.folder).layers[0].feed_forward.router_bias
    assert bias.abs().max() > 0 and not bias.requires_grad
    score = Eval.read({}).make(tmp_path / "eval-moe", {"model": made, **data}, Run(quiet=True))
    assert math.isfinite(score.figures["loss"].value)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_model_of_latent_attention_trains_and_is_its_class_in_transformers(
    family: str, data_folder: Path, tmp_path: Path
) -> None:
    import transformers

    latent = {"kind": "mla", "head_dim": 12, "rope_dim": 8, "latent_dim": 16, "q_latent_dim": 20}
    model = {**SHAPE.model_dump(), "family": family, "num_layers": 2, "num_dense_layers": 1, "mixers": [latent]}
    sizes = {"batch_size": 4, "seq_len": 32, "steps": 6, "optimizer": {"lr": 4e-3}, "precision": "bf16"}
    data = {"data": Artifact.read(data_folder)}
    made = Train.read({"model": model, **sizes}).make(tmp_path / "train-latent", data, Run(quiet=True))
    first, *_, last = [row["loss"] for row in read_jsonl(made.folder / "steps.jsonl") if "loss" in row]
    assert last < first
    again = Train.read({"model": model, **sizes}).make(
        tmp_path / "train-again", {**data, "model": made}, Run(quiet=True)
    )
    further = [row["loss"] for row in read_jsonl(again.folder / "steps.jsonl") if "loss" in row]
    assert further[0] < first
    ours, tokens = load(again.folder, dtype=torch.float32), torch.arange(60).view(2, 30)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(again.folder, dtype=torch.float32)
    assert (
        type(theirs).__name__
        == {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[family]
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    if family == "deepseek_v3":
        moved = ours.layers[1].feed_forward.router_bias
        assert moved.dtype == torch.float32 and moved.any()
        torch.testing.assert_close(
            moved, (moved / 1e-3).round() * 1e-3, atol=1e-7, rtol=0.0
        )  # bfloat16 would have rounded it


@pytest.mark.parametrize(
    ("parallelism", "moe", "said"),
    [
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "pipedream"},
            SOFTMAX,
            "stages update at different times",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "dualpipe", "expert_parallel_degree": 2},
            SOFTMAX,
            "dualpipe has each stage on two ranks",
        ),
        (
            {"tensor_parallel_degree": 2, "enable_async_tensor_parallel": True},
            SOFTMAX,
            "layers.0 is moe, which uses its input beside",
        ),
        ({"tensor_parallel_degree": 3}, {**SOFTMAX, "intermediate_size": 32}, "cannot be divided among 3"),
        ({"context_parallel_degree": 2}, SIGMOID, "layer 0 has a capacity_factor or a sequence_loss"),
        ({"context_parallel_degree": 2}, SWITCH, "layer 0 has a capacity_factor or a sequence_loss"),
        ({"data_parallel": "local_sgd"}, SIGMOID, "layer 0 has the balance 'bias'"),
    ],
)
def test_layouts_that_do_not_train_experts_yet_say_so(parallelism: Any, moe: dict[str, Any], said: str) -> None:
    config = SHAPE.model_copy(update={"feed_forward": (moe,)}).config(64)
    with pytest.raises(SpecError, match=said):
        Parallelism.read(parallelism).check(config, seq_len=32)


WHOLE: list[dict[str, Any]] = [{"model": {"num_layers": 2, "feed_forward": [one]}} for one in (SOFTMAX, {**SIGMOID, "balance": ["bias"]})]  # fmt: skip
"""What is the same however tokens are divided."""
WHOLE += [{"model": {"num_layers": 2, "family": "gpt_oss", "window": 9, "mixers": ["sliding_window", "attention"], "feed_forward": [GPT_OSS]}}]  # fmt: skip
PARTS: list[dict[str, Any]] = [{"model": {"num_layers": 2, "feed_forward": [one]}} for one in (SIGMOID, SWITCH, GSHARD)]
"""What is of each micro-batch: capacities, losses and random choices."""


@pytest.fixture(scope="module")
def alone(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list, list[dict[str, torch.Tensor]]]:
    """Losses and weights of one process with two micro-batches, each as large as a rank's."""
    folder = tmp_path_factory.mktemp("alone")
    settings = [{**one, "gradient_accumulation_steps": 2} for one in (*WHOLE, *PARTS)]
    [losses] = on_ranks(1, trained, str(data_folder), str(folder), settings)
    return losses, [weights_of(folder, number, 1)[0] for number in range(len(settings))]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_pipeline_stages_train_experts_as_one_process_does(schedule: str, data_folder: Path, tmp_path: Path) -> None:
    """Loads, biases, losses of layers and random choices, of stages of which one may have no experts; and what one saves is read by the other."""
    shape = {"num_layers": 4, "tie_embeddings": False, "feed_forward": ["swiglu", SIGMOID]}
    drops = {**shape, "feed_forward": [{**GSHARD, "router": "hash", "jitter": 0.0, "balance": []}, SWITCH]}
    first, settings = {**shape, "feed_forward": [SIGMOID, "swiglu", "swiglu", "swiglu"]}, []
    for number, one in enumerate((shape, drops, first)):
        kept = {"write": str(tmp_path / f"kept{number}-{schedule}")}
        settings.append({"model": one, "gradient_accumulation_steps": 4, **kept})
    layout = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    [losses] = on_ranks(1, trained, str(data_folder), str(tmp_path), settings)
    alone = [
        Checkpoints(Path(one["write"])).newest()[1]["router_bias"] for one in settings if one["model"] is not drops
    ]  # type: ignore[index]
    for rank in on_ranks(
        2, trained, str(data_folder), str(tmp_path), [{**one, "parallelism": layout} for one in settings]
    ):
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(losses), rtol=2e-6, atol=2e-6)
    for number in range(len(settings)):
        whole = weights_of(tmp_path, number, 1)[0]
        for one in weights_of(tmp_path, number, 2):
            assert_same_weights(one, whole, "adamw")
    stages = [
        Checkpoints(Path(one["write"])).newest()[1]["router_bias"] for one in settings if one["model"] is not drops
    ]  # type: ignore[index]
    assert stages == alone and all(any(map(any, one.values())) for one in alone)


def test_stages_in_bf16_gather_the_biases_in_float32(data_folder: Path, tmp_path: Path) -> None:
    """They are not trained, so that they are no bf16 weights with a master: those of all stages are as the checkpoint has them."""
    model = {"num_layers": 4, "tie_embeddings": False, "feed_forward": [SIGMOID]}
    setting = {"model": model, "gradient_accumulation_steps": 2, "precision": "bf16", "write": str(tmp_path / "kept")}
    setting["parallelism"] = {"pipeline_parallel_degree": 2}
    on_ranks(2, trained, str(data_folder), str(tmp_path), [setting])
    kept = Checkpoints(tmp_path / "kept").newest()[1]["router_bias"]  # type: ignore[index]
    assert len(kept) == 4 and all(map(any, kept.values()))
    for found in weights_of(tmp_path, 0, 2):
        for index, bias in kept.items():
            assert torch.equal(found[f"layers.{index}.feed_forward.router_bias"], torch.tensor(bias))
            assert found[f"layers.{index}.feed_forward.down.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "ring", "ulysses"])
def test_two_ranks_train_experts_as_one_process_does(
    layout: str, alone: Any, data_folder: Path, tmp_path: Path
) -> None:
    losses, weights = alone
    shared: dict[str, Any] = {"data_parallel": layout}
    settings = [*WHOLE, *PARTS]
    if layout in CONTEXT_PARALLEL:
        shared = {"context_parallel": layout, "context_parallel_degree": 2, "gradient_accumulation_steps": 2}
        settings = WHOLE
    found = on_ranks(2, trained, str(data_folder), str(tmp_path), [{**one, **shared} for one in settings])
    for rank in found:
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(losses[: len(settings)]), rtol=2e-6, atol=2e-6)
    for number in range(len(settings)):
        for one in weights_of(tmp_path, number, 2):
            assert_same_weights(one, weights[number], "adamw")
