"""Objectives that compare layers: against their definitions, with recomputed layers, on ranks, and where ranks have parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hone.base.errors import SpecError
from hone.feed.load import Batch
from hone.model.adapters import ADAPTERS
from hone.model.adapters.peft import adapted
from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.taps import check_taps, teacher_layer
from hone.train.schedules.cosine import Cosine
from hone.train.stage import Train
from tests.train.conftest import SHAPE
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.objectives.test_objectives import VOCAB, batch, model
from tests.train.ranks import trained

WIDE = SHAPE.model_copy(update={"hidden_size": 64, "num_layers": 6, "num_heads": 8})


def after(one: Decoder, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states after each layer."""
    x, found, context = one.embed(tokens), [], Causal(tokens)
    one.prepare(x, context)
    for layer in one.layers:
        x = layer(x, context)
        found.append(x)
    return found


def distances(x: torch.Tensor) -> torch.Tensor:
    return (x[:, None] - x[None, :]).square().sum(-1).add(1e-20).sqrt()


def defined(kind: str, own: torch.Tensor, theirs: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The comparison of hidden states [S, D] and [S, D'] of one sequence, summed over its valid positions."""
    if kind == "squared":
        return ((own - theirs) ** 2).mean(-1)[valid].sum() / 2
    if kind == "cosine":
        return (1 - (F.normalize(own, dim=-1) * F.normalize(theirs, dim=-1)).sum(-1))[valid].sum()
    mine, wanted = distances(own[valid]), distances(theirs[valid])
    count = len(mine)
    off = 1 - torch.eye(count, dtype=own.dtype)
    mine, wanted = (one / ((one * off).sum() / (count * (count - 1))) for one in (mine, wanted))
    return (F.smooth_l1_loss(mine, wanted, reduction="none") * off).sum() / (count - 1)


def trainer(student: Decoder, teacher: Decoder, objective: dict, segments: str = "none") -> Trainer:
    return Trainer(
        student,
        steps=3,
        schedule=Cosine(),
        objective=OBJECTIVES.read({"alpha": 0.5, **objective}),
        activation_checkpointing=ACTIVATION_CHECKPOINTINGS.read(segments),
        teacher=teacher,
    )


@pytest.mark.parametrize(
    ("kind", "fields", "shape"),
    [
        ("squared", {"kind": "hidden_states"}, SHAPE.model_copy(update={"num_layers": 8})),
        ("cosine", {"kind": "hidden_states", "metric": "cosine", "layers": (1, 3), "weight": 2.0}, SHAPE),
        ("relations", {"kind": "relations", "layers": (0, 2)}, WIDE),
    ],
)
def test_the_comparison_is_its_definition_beside_distill_recomputed_or_not(kind, fields, shape):
    tokens, targets = batch()
    given = Batch(tokens.numpy(), targets.numpy(), torch.zeros_like(tokens).int().numpy())
    teacher = build(shape.config(VOCAB), seed=5).double()
    valid, found = targets != -100, []
    for segments in ("none", "full"):
        one = trainer(model(0), teacher, fields, segments)
        one.model.double()
        sums, _ = one.gradients(given)
        found.append((sums.loss, [parameter.grad.clone() for parameter in one.model.parameters()]))
        objective = one.objective
    student = model(0).double()
    own, theirs = after(student, tokens), after(teacher, tokens)
    assert objective.pairs(4, len(theirs)) == tuple(
        (layer, round((layer + 1) * len(theirs) / 4) - 1) for layer in objective.layers or range(4)
    )
    compared = [
        sum(defined(kind, own[a][row], theirs[b][row], valid[row]) for row in range(3))
        for a, b in objective.pairs(4, len(theirs))
    ]
    with torch.no_grad():
        last = teacher.hidden(tokens, Causal(tokens))
    apart = OBJECTIVES.read({"kind": "distill", "alpha": 0.5}).total(student, own[-1], targets, teacher, last)
    expected = apart + objective.weight * sum(compared) / len(compared)
    (expected / int(valid.sum())).backward()
    wanted = [parameter.grad for parameter in student.parameters()]
    for loss, gradients in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6, check_dtype=False)
        for ours, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-6)


def test_ranks_that_share_sequences_train_as_one_process_does(data_folder, tmp_path):
    """Layers gathered one by one, recomputed and in micro-batches, beside one process without any of that."""
    kinds: list[dict[str, Any]] = [{"kind": "hidden_states"}, {"kind": "relations", "layers": [1]}]
    plain = [{"model": {"num_layers": 2}, "distill": one, "uneven": True} for one in kinds]
    more = {"data_parallel": "zero3", "gradient_accumulation_steps": 2, "activation_checkpointing": "full"}
    [alone] = on_ranks(1, trained, str(data_folder), str(tmp_path), plain)
    shared = on_ranks(2, trained, str(data_folder), str(tmp_path), [one | more for one in plain])
    for number in range(len(kinds)):
        whole = torch.load(tmp_path / f"{number}-1-0.pt")
        for rank, losses in enumerate(shared):
            np.testing.assert_allclose(losses[number], alone[number], rtol=1e-5)
            for name, found in torch.load(tmp_path / f"{number}-2-{rank}.pt").items():
                torch.testing.assert_close(found, whole[name], rtol=1e-5, atol=2e-6)


def test_layers_are_compared_at_equal_depth():
    assert [teacher_layer(layer, 3, 6) for layer in range(3)] == [1, 3, 5]
    assert [teacher_layer(layer, 4, 6) for layer in range(4)] == [1, 2, 3, 5]  # 1.5 and 4.5 to the even one
    assert teacher_layer(0, 6, 2) == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"parallelism": {"tensor_parallel_degree": 2}}, "tensor_parallel_degree 2"),
        ({"parallelism": {"context_parallel_degree": 2}}, "context_parallel_degree 2"),
        ({"objective": {"kind": "hidden_states", "teacher_layers": [1, 6]}}, "the teacher has layers 0 to 5"),
        ({"objective": {"kind": "hidden_states", "teacher_layers": [1, 5]}}, "has 2 layers beside 4"),
        ({"objective": {"kind": "minilm", "compares": "attention_values"}}, "the student has 4, the teacher 8"),
        ({"objective": {"kind": "minilm", "relation_heads": 5}}, "relation_heads 5 does not divide"),
        ({"objective": "attention_maps"}, "the student has 4 heads, the teacher 8"),
        (
            {"objective": "hidden_states", "parallelism": {"data_parallel": {"kind": "local_sgd", "sync_every": 4}}},
            "local_sgd take steps of their own",
        ),
        ({"objective": "minilm", "compile": True}, "compiled layers do not show"),
        ({"objective": {"kind": "relations", "layers": [4]}}, r"objective.layers \[4\]: the student has layers 0 to 3"),
    ],
)
def test_what_cannot_be_compared_is_refused(fields, said):
    spec = Train.read({"objective": "relations", **fields})
    with pytest.raises(SpecError, match=said):
        check_taps(spec, SHAPE.config(VOCAB), WIDE.config(VOCAB))
    check_taps(Train.read({"objective": "distill"}), SHAPE.config(VOCAB), WIDE.config(VOCAB))


def test_heads_of_a_model_with_a_soft_prompt_are_refused():
    plain = SHAPE.config(VOCAB)
    prompted = adapted(plain, ADAPTERS.read("prefix"))
    for kind in ("minilm", "attention_maps"):
        spec = Train.read({"objective": kind})
        check_taps(spec, plain, plain)
        for one, other in ((prompted, plain), (plain, prompted)):
            with pytest.raises(SpecError, match="see a soft prompt"):
                check_taps(spec, one, other)
    check_taps(Train.read({"objective": "hidden_states"}), prompted, plain)
