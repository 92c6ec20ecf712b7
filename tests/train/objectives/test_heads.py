"""Objectives on queries, keys and values, and learned projections, against a few lines of torch that share nothing with them."""

from __future__ import annotations

import math

import pytest
import torch

from hone.base.errors import SpecError
from hone.feed.load import Batch
from hone.model.context import Packed
from hone.model.decoder import Decoder, build
from hone.model.mixers import MIXERS
from hone.train import ACTIVATION_CHECKPOINTINGS, OBJECTIVES
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer
from hone.train.objectives.heads import apart, check_heads, visible
from hone.train.objectives.projections import Projected
from hone.train.objectives.seen import Heads
from hone.train.objectives.taps import tap
from hone.train.schedules.cosine import Cosine
from tests.train.conftest import SHAPE
from tests.train.objectives.test_objectives import VOCAB, batch, model

SAME = SHAPE.model_copy(update={"num_layers": 6})
WIDE = SHAPE.model_copy(update={"num_layers": 2, "hidden_size": 64})
MORE = SHAPE.model_copy(update={"num_layers": 2, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 4})


def given() -> Batch:
    """Three sequences, the second of two documents."""
    tokens, targets = batch()
    ids = torch.zeros_like(tokens).int()
    ids[1, 8:] = 1
    targets[1, 7] = -100
    return Batch(tokens.numpy(), targets.numpy(), ids.numpy())


def passed(one: Decoder) -> list[dict[str, torch.Tensor]]:
    """(hidden, q, k, v) of every layer of `one` for `given`, heads apart: [B, heads, S, Dh], rotated by hand."""
    tokens, ids = torch.from_numpy(given().tokens), torch.from_numpy(given().document_ids)
    x, found, context = one.embed(tokens), [], Packed(ids)
    one.prepare(x, context)
    place = torch.arange(20).expand(3, 20).clone()
    place[1, 8:] -= 8
    for layer in one.layers:
        spec = layer.mixer.spec
        size = spec.head_dim
        all_heads = torch.nn.functional.linear(layer.mixer_norm(x), layer.mixer.qkv.weight.flatten(0, -2))
        all_heads = all_heads.view(3, 20, -1, size).transpose(1, 2)
        angles = place[:, None, :, None] * spec.rope.theta ** (-torch.arange(0, size, 2).double() / size)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = all_heads.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        q, k = turned.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)[:2]
        x = layer(x, context)
        found.append({"hidden": x, "q": q, "k": k, "v": all_heads[:, -spec.num_kv_heads :]})
    return found


def sees(row: int, at: int) -> slice:
    """The tokens that token `at` of sequence `row` sees."""
    return slice(8 if row == 1 and at >= 8 else 0, at + 1)


def kl(own: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    p = theirs.softmax(-1)
    return (p * (theirs.log_softmax(-1) - own.log_softmax(-1))).sum()


def related(own: torch.Tensor, theirs: torch.Tensor, heads: int, row: int, at: int) -> torch.Tensor:
    """KL of a token's relations in `heads` heads of the numbers of all heads [H, S, Dh], a mean over them."""
    total = torch.zeros(())
    for head in range(heads):
        both = []
        for x in (own, theirs):
            flat = x.transpose(0, 1).flatten(1)  # [S, H Dh]
            part = flat.chunk(heads, 1)[head]
            both.append(part[sees(row, at)] @ part[at] / math.sqrt(part.shape[1]))
        total = total + kl(*both)
    return total / heads


def attended(one: dict[str, torch.Tensor], row: int, at: int, head: int) -> torch.Tensor:
    share = one["q"].shape[1] // one["k"].shape[1]
    return one["k"][row, head // share, sees(row, at)] @ one["q"][row, head, at] / math.sqrt(one["q"].shape[-1])


def defined(kind: str, own: dict, theirs: dict, row: int, at: int) -> torch.Tensor:
    if kind == "v2":
        return sum(related(own[name][row], theirs[name][row], 2, row, at) for name in "qkv")
    heads = own["q"].shape[1]
    maps = [[attended(one, row, at, head) for one in (own, theirs)] for head in range(heads)]
    if kind == "v1":
        return sum(kl(*both) for both in maps) / heads + related(own["v"][row], theirs["v"][row], 2, row, at)
    return (
        sum((a - b).square().mean() for a, b in maps) / heads
        + (own["hidden"][row, at] - theirs["hidden"][row, at]).square().mean()
    )


@pytest.mark.parametrize(
    ("kind", "fields", "shape", "pairs"),
    [
        ("v2", {"kind": "minilm"}, MORE, [(3, 1)]),
        ("v2", {"kind": "minilm", "layers": (1, 2), "teacher_layers": (0, 0), "relation_heads": 2}, WIDE, [(1, 0), (2, 0)]),
        ("v1", {"kind": "minilm", "compares": "attention_values"}, WIDE, [(3, 1)]),
        ("maps", {"kind": "attention_maps", "layers": (0, 2)}, SAME, [(0, 1), (2, 3)]),
    ],
)  # fmt: skip
def test_each_is_its_definition_recomputed_or_not(kind, fields, shape, pairs):
    data, found = given(), []
    teacher = build(shape.config(VOCAB), seed=5).double()
    objective = OBJECTIVES.read({"alpha": 0.5, "weight": 2.0, **fields})
    assert [*objective.pairs(4, shape.num_layers)] == pairs
    for segments in ("none", "full"):
        how = {"activation_checkpointing": ACTIVATION_CHECKPOINTINGS.read(segments), "teacher": teacher}
        one = Trainer(model(0), steps=3, schedule=Cosine(), objective=objective, **how)
        one.model.double()
        sums, _ = one.gradients(data)
        found.append((sums.loss, [parameter.grad.clone() for parameter in one.model.parameters()]))
    student, targets = model(0).double(), torch.from_numpy(data.targets)
    with torch.no_grad():
        theirs = passed(teacher)
    own = passed(student)
    valid = [(row, at) for row in range(3) for at in range(20) if targets[row, at] != -100]
    compared = sum(defined(kind, own[a], theirs[b], row, at) for a, b in pairs for row, at in valid) / len(pairs)
    if kind == "maps":
        tokens = torch.from_numpy(data.tokens)
        apart = (student.embed(tokens) - teacher.embed(tokens).detach()).square().mean(-1)
        compared = compared + sum(apart[row, at] for row, at in valid)
    plain = OBJECTIVES.read({"kind": "distill", "alpha": 0.5})
    last = own[-1]["hidden"], theirs[-1]["hidden"]
    expected = plain.total(student, last[0], targets, teacher, last[1]) + 2.0 * compared
    (expected / len(valid)).backward()
    for loss, gradients in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6, check_dtype=False)
        for ours, parameter in zip(gradients, student.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("mine", "wanted", "fewest"), [(None, None, 20), (None, 5, 5), (7, 3, 3), (4, None, 4)])
def test_a_token_is_compared_over_what_it_sees_in_both_layers(mine, wanted, fewest):
    ids = torch.from_numpy(given().document_ids)
    q = torch.randn(3, 20, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    both = Heads(q, q, q, mine), Heads(q, q, q, wanted)
    seen = visible(Packed(ids), 20, torch.device("cpu"), both)
    for row in range(3):
        for at in range(20):
            first = max(8 if row == 1 and at >= 8 else 0, at + 1 - fewest)
            assert seen.expand(3, 1, 20, 20)[row, 0, at].nonzero().flatten().tolist() == list(range(first, at + 1))
    scores = torch.randn(2, 3, 2, 20, 20, generator=torch.Generator().manual_seed(1)).double()
    first = max(0, 20 - fewest)
    expected = sum(kl(*scores[:, 0, head, 19, first:]) for head in range(2)) / 2
    torch.testing.assert_close(apart(scores[0], scores[1], seen)[0, 19], expected)


def test_layers_tell_their_windows():
    windowed = build(SHAPE.model_copy(update={"family": "mistral", "window": 6}).config(VOCAB), seed=5)
    context = Packed(torch.from_numpy(given().document_ids))
    objective = OBJECTIVES.read({"kind": "minilm"})
    tap(objective, windowed, windowed, context)
    windowed.hidden(torch.from_numpy(given().tokens), context)
    assert [one.window for one in context.memo["heads"].values()] == [6]


def narrow(fields: dict) -> Trainer:
    teacher = build(WIDE.config(VOCAB), seed=5)
    objective = OBJECTIVES.read({"alpha": 0.5, **fields})
    return Trainer(model(0), steps=4, schedule=Cosine(warmup=0), objective=objective, teacher=teacher)


@pytest.mark.parametrize("kind", ["hidden_states", "attention_maps"])
def test_unlike_widths_are_compared_through_learned_matrices(kind, tmp_path):
    one = narrow({"kind": kind, "layers": (1,)})
    assert isinstance(one.tutor, Projected)
    matrices = one.tutor.matrices
    assert [*matrices] == ([1] if kind == "hidden_states" else [-1, 1]) and matrices[1].shape == (64, 48)
    data = given()
    targets = torch.from_numpy(data.targets)
    _, counts = one.gradients(data)
    with torch.no_grad():
        own, theirs = passed(one.model)[1]["hidden"], passed(one.teacher)[0]["hidden"]
    matrix = matrices[1].detach().clone().requires_grad_()
    share = 0.5 if kind == "hidden_states" else 1.0
    loss = share * ((own @ matrix.T - theirs).square().mean(-1) * (targets != -100)).sum() / counts.targets
    loss.backward()
    torch.testing.assert_close(matrices[1].grad, matrix.grad, rtol=1e-3, atol=1e-7)
    one.model.zero_grad()
    for parameter in matrices.values():
        parameter.grad = None
    before = matrices[1].detach().clone()
    one.step(data)
    assert not torch.equal(before, matrices[1])
    checkpoints = Checkpoints(tmp_path, keep=1)
    one.save(checkpoints)
    checkpoints.finish()
    again, found = narrow({"kind": kind, "layers": (1,)}), checkpoints.newest()
    assert found is not None
    again.restore(*found)
    assert one.step(data).loss == again.step(data).loss
    assert one.step(data).loss == again.step(data).loss
    for layer, parameter in matrices.items():
        assert torch.equal(parameter, again.tutor.matrices[layer])


def test_close_states_keep_their_distances():
    """Distances of states that are nearly one: by dot products most of their digits would be rounding."""
    draw = torch.Generator().manual_seed(0)
    near = 100 + 0.01 * torch.randn(1, 40, 16, generator=draw)
    objective = OBJECTIVES.read("relations")
    from hone.train.objectives.seen import Seen

    valid = torch.ones(1, 40, dtype=torch.bool)
    one, other = Seen(0, near), Seen(0, near * 1.5)
    assert float(objective.compared(one, other, valid, None).sum()) < 1e-6


def test_layers_without_heads_are_refused():
    config = SHAPE.config(VOCAB)
    mixer = MIXERS.read({"kind": "linformer", "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "max_seq_len": 32})
    layers = (config.layers[0].model_copy(update={"mixer": mixer}), *config.layers[1:])
    with pytest.raises(SpecError, match="layer 0 of the student has mixer 'linformer'"):
        check_heads(config.model_copy(update={"layers": layers}), [0], "student", "minilm")
    check_heads(config, [0, 1], "student", "minilm")
