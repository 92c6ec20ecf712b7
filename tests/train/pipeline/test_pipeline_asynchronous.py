"""PipeDream's schedules in a training: each pass reads the weights that its definition names, each update makes the next ones."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import MEMORY, facts_of
from hone.feed.load import Batch, PackedTokens
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.train.objectives.next_token import NextToken
from hone.train.optimizers.adamw import AdamW
from hone.train.optimizers.base import Entry
from hone.train.passes import cut, to_device
from hone.train.pipeline.stages import divide
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from hone.train.weights import describe_parameters
from tests.ranked import together
from tests.train.conftest import SHAPE, STEADY
from tests.train.data_parallel.test_data_parallel import SPEC, on_ranks, weights_of
from tests.train.ranks import BATCH, SEQ, STEPS, made, trained

SETTING: dict[str, Any] = {
    "model": {"num_layers": 4, "tie_embeddings": False},
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0,
}


def layout(kind: Any, degree: int, **others: Any) -> dict[str, Any]:
    return {"parallelism": {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": kind, **others}}


def version(kind: str, stage: int, stages: int, number: int, each: int) -> int:
    """The number of a stage's updates, in this step, before the weights that micro-batch `number` reads there."""
    if kind == "pipedream":  # as many as there are when it arrives
        return max(0, number - (stages - 1 - stage))
    if kind == "pipedream_vertical":  # as many as there were at the first stage
        return max(0, number - (stages - 1))
    return max(0, number // each - 1)


def by_definition(
    data: PackedTokens, kind: str, stages: int, micro_batches: int, dp: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(loss of each step, last weights) of a loop over micro-batches in one process, which keeps every version of every stage."""
    config = SHAPE.model_copy(update=SETTING["model"]).config(data.vocab_size, eos=data.eos_token_id)
    model, each = build(config, seed=1).train(), stages if kind == "pipedream_2bw" else 1
    layers, named, schedule = divide(config, stages, SEQ), dict(model.named_parameters()), Cosine(warmup=1)
    of_stage: dict[int, list[str]] = {}
    for name in named:
        at = next((s for s, part in enumerate(layers) if any(name.startswith(f"layers.{i}.") for i in part)), None)
        of_stage.setdefault(at if at is not None else 0 if name.startswith("embed") else stages - 1, []).append(name)
    parameters = describe_parameters(model)
    groups = AdamW(lr=1e-3, **STEADY).groups(parameters)
    states = {
        name: group.rule.start(named[name].detach(), parameters[name]) for group in groups for name in group.names
    }
    losses, count = [], 0
    for step in range(STEPS):
        batch = data.sequences(np.arange(step * BATCH, (step + 1) * BATCH), SEQ, 0)
        shares = [
            cut(one, micro_batches) for one in cut(batch, dp)
        ]  # a micro-batch has sequences of each data-parallel rank
        parts = [
            Batch(*(np.concatenate(arrays) for arrays in zip(*one, strict=True))) for one in zip(*shares, strict=True)
        ]
        history = [{name: named[name].detach().clone() for name in of_stage[s]} for s in range(stages)]
        versions = [[one] for one in history]
        total = targets_seen = 0.0
        for number, part in enumerate(parts):
            for stage in range(stages):
                for name, value in versions[stage][version(kind, stage, stages, number, each)].items():
                    named[name].data = value.clone()
            tokens, targets, context = to_device(part, torch.device("cpu"))
            first = number // each * each
            divisor = sum(NextToken().count(one.targets) for one in parts[first : first + each])
            x = model.hidden(tokens, context)
            loss = NextToken().total(model, x, targets, None, None)
            (loss * (1 / divisor)).backward()
            total, targets_seen = total + loss.item(), targets_seen + NextToken().count(part.targets)
            if (number + 1) % each:
                continue
            count += 1
            for stage in range(stages):
                new = {name: value.clone() for name, value in versions[stage][-1].items()}
                for group in groups:
                    mine = [name for name in group.names if name in new]
                    entries = [Entry(new[name], named[name].grad, states[name], parameters[name]) for name in mine]
                    lr = 1e-3 * schedule.share(step, STEPS) * group.lr_factor
                    if entries:
                        group.rule.step(entries, count=count, lr=lr, weight_decay=group.weight_decay)
                versions[stage].append(new)
            model.zero_grad()
        for stage in range(stages):
            for name, value in versions[stage][-1].items():
                named[name].data = value
        losses.append(total / targets_seen)
    return losses, {name: value.detach().clone() for name, value in named.items()}


KINDS = ["pipedream", "pipedream_vertical", "pipedream_2bw"]


@pytest.mark.parametrize(
    ("stages", "others", "bound"),
    [
        (2, {}, 0.0),
        pytest.param(4, {}, 0.0, marks=pytest.mark.slow),
        pytest.param(2, {"data_parallel": "zero1"}, 2e-6, marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel_degree": 2}, 2e-6, marks=pytest.mark.slow),
    ],
    ids=["2", "4", "2-zero1", "2-tp2"],
)
def test_each_pass_reads_the_weights_of_its_definition(stages, others, bound, data_folder, tmp_path):
    """To the bit where no sum crosses ranks."""
    num_ranks = stages * (2 if others else 1)
    settings = [{**SETTING, **layout(kind, stages, **others)} for kind in KINDS]
    found = on_ranks(num_ranks, trained, str(data_folder), str(tmp_path), settings)
    assert all(one == found[0] for one in found), "ranks differ in losses"
    data, ends, dp = PackedTokens(data_folder), [], 2 if "data_parallel" in others else 1
    for number, kind in enumerate(KINDS):
        losses, weights = by_definition(data, kind, stages, SETTING["gradient_accumulation_steps"], dp)
        assert [one[0] for one in found[0][number]] == pytest.approx(losses, rel=1e-6)
        for one in weights_of(tmp_path, number, num_ranks):
            for name, whole in weights.items():
                assert (one[name] - whole).abs().max() <= bound, f"{kind} {name}"
        ends.append(weights["embed_tokens.weight"])
    assert not torch.equal(ends[0], ends[2]), "schedules that read other weights end with other weights"


@pytest.mark.slow
def test_a_killed_training_resumes_with_the_same_bits(data_folder, tmp_path):
    """Between two steps all updates are made and no pass is under way, so nothing is lost."""
    model = {**SPEC["model"], "tie_embeddings": False}
    spec = {**SPEC, "model": model, "max_grad_norm": 0, "gradient_accumulation_steps": 4, **layout("pipedream_2bw", 2)}
    [whole, _] = on_ranks(2, made, spec, str(data_folder), str(tmp_path / "whole"))
    ended = together(2, made, spec, str(data_folder), str(tmp_path / "killed"), 3)
    assert ended[1].returncode == -signal.SIGKILL and "the stage resumes" in ended[0].result
    assert on_ranks(2, made, spec, str(data_folder), str(tmp_path / "killed")) == [whole, whole]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"max_grad_norm": 1.0}, "set max_grad_norm: 0, or take 1f1b"),
        ({"precision": "fp16"}, "works in fp32 and bf16, not in fp16"),
        (
            {"optimizer": {"kind": "adamw", "skip_step": True}},
            "skip_step does not work with pipeline_parallel_schedule",
        ),
        ({"model": {"tie_embeddings": True}}, "a tied embedding: the first and the last stage both have it"),
        ({"gradient_accumulation_steps": 1, "batch_size": 2}, "PipeDream-2BW with 1 microbatches"),
    ],
)
def test_what_needs_a_global_step_is_refused(spec, said, data_folder):
    facts, two = {"data": facts_of(Artifact.read(data_folder))}, describe("cpu").model_copy(update={"num_ranks": 2})
    model = {**SPEC["model"], "tie_embeddings": False, **spec.get("model", {})}
    whole = {**SPEC, "max_grad_norm": 0, "gradient_accumulation_steps": 4, **layout("pipedream_2bw", 2), **spec}
    with pytest.raises(SpecError, match=said):
        Train.read({**whole, "model": model}).plan(facts, two)


def test_identity_and_memory_of_asynchronous_schedules(data_folder):
    facts, two = {"data": facts_of(Artifact.read(data_folder))}, describe("cpu").model_copy(update={"num_ranks": 2})
    base = {**SPEC, "max_grad_norm": 0, "gradient_accumulation_steps": 4}
    base["model"] = {**base["model"], "tie_embeddings": False}

    def train(kind: str) -> Train:
        return Train.read({**base, **layout(kind, 2)})

    assert train("1f1b").identity() == train("zb_v").identity()
    assert len({str(train(kind).identity()) for kind in ("1f1b", *KINDS)}) == 4
    plans = {kind: train(kind).plan(facts, two) for kind in ("1f1b", *KINDS)}
    assert plans["pipedream"].estimates[MEMORY].value > plans["1f1b"].estimates[MEMORY].value
    assert any("versions" in line for line in plans["pipedream"].notes)
