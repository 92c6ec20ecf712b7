"""Each router and each rule of drops against scalar code of its paper, through layers of experts that are a loop, with gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.model.block import Placement
from hone.model.context import Causal
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.feed_forwards.moe import MoE, MoELayer
from hone.model.linear import make_dense
from hone.model.routers.hash import mixed

D, E, SEQUENCES, LENGTH = 8, 6, 2, 7
T = SEQUENCES * LENGTH
Visits = list[list[tuple[int, Tensor]]]
"""Of each token, its experts and their weights."""


def layer_of(**options: Any) -> MoELayer:
    spec = FEED_FORWARDS.read({"kind": "moe", "intermediate_size": 5, "num_experts": E, **options})
    layer = spec.build(Placement(D, 0, "layers.0.feed_forward", 1e-6, make_dense))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    assert sum(one.numel() for one in layer.parameters()) == spec.num_params(D)
    return layer


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(SEQUENCES, LENGTH, D, generator=torch.Generator().manual_seed(seed))


def context(draw: int | None = None) -> Causal:
    found = Causal(torch.zeros(SEQUENCES, LENGTH))
    found.tokens = torch.arange(T).view(SEQUENCES, LENGTH) % 5
    found.draw = draw
    return found


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def looped(layer: MoELayer, x: Tensor, visits: Visits) -> Tensor:
    """The sum over each token's visits, one product after another."""
    made = []
    for token, row in zip(x.flatten(0, 1), visits, strict=True):
        whole = torch.zeros(D)
        for expert, weight in row:
            whole = whole + weight * gated(token, layer.gate_up.weight[expert], layer.down.weight[expert])
        made.append(whole)
    return torch.stack(made).view_as(x)


def logits_of(layer: MoELayer, x: Tensor) -> Tensor:
    return F.linear(x.flatten(0, 1), layer.router.weight)


def ranked(row: Tensor, count: int) -> list[int]:
    """The places of the `count` largest numbers."""
    return sorted(range(len(row)), key=lambda place: -float(row[place].detach()))[:count]


def top(layer: MoELayer, x: Tensor, k: int, *, normalize: bool = True, scale: float = 1.0) -> Visits:
    found = []
    for row in logits_of(layer, x).softmax(-1):
        chosen = ranked(row, k)
        whole = sum(row[one] for one in chosen) if normalize else 1.0
        found.append([(one, scale * row[one] / whole) for one in chosen])
    return found


def agree(layer: MoELayer, x: Tensor, visits: Visits, made: Tensor) -> None:
    """Output, and gradients of input and weights, are those of the loop."""
    tensors = [x, *(one for one in layer.parameters() if one.requires_grad)]
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    expected = looped(layer, x, visits)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)  # float32 sums in another order
    pairs = [torch.autograd.grad(one, tensors, upstream, allow_unused=True) for one in (made, expected)]
    for own, other in zip(*pairs, strict=True):
        other = torch.zeros(()) if other is None else other
        torch.testing.assert_close(own if own is not None else torch.zeros(()), other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("router", "k", "normalize"),
    [({"kind": "softmax", "top_k": 2}, 2, True), ({"kind": "softmax", "top_k": 3, "normalize": False}, 3, False), ("switch", 1, False)],
)  # fmt: skip
def test_softmax_routers_visit_the_best(router: Any, k: int, normalize: bool) -> None:
    layer, x = layer_of(router=router), inputs().requires_grad_()
    agree(layer, x, top(layer, x, k, normalize=normalize), layer(x, context()))


def test_softmax_over_the_chosen_alone_is_the_same() -> None:
    layer, x = layer_of(router={"kind": "softmax", "top_k": 2}), inputs()
    values, ids = logits_of(layer, x).topk(2)  # Mixtral's order of the two
    visits = [list(zip(row, weights)) for row, weights in zip(ids.tolist(), values.softmax(-1))]
    torch.testing.assert_close(layer(x, context()), looped(layer, x, visits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_the_bias_takes_part_in_the_choice_alone_and_groups_limit_it(kind: str, groups: int) -> None:
    router = {"kind": kind, "top_k": 2, "scale": 2.5, "num_groups": groups, "top_groups": min(2, groups)}
    layer, x = layer_of(router=router, balance=[{"kind": "bias"}]), inputs().requires_grad_()
    assert not layer.router_bias.requires_grad
    found = []
    logits = logits_of(layer, x)
    for row in logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1):
        biased = (row + layer.router_bias).detach()
        each = E // groups
        strength = [sum(sorted(biased[g * each : (g + 1) * each].tolist())[-(2 if kind == "sigmoid" else 1) :]) for g in range(groups)]  # fmt: skip
        allowed = sorted(range(groups), key=lambda g: -strength[g])[: min(2, groups)]
        chosen = sorted((e for e in range(E) if e // each in allowed), key=lambda e: -float(biased[e]))[:2]
        whole = sum(row[one] for one in chosen)
        found.append([(one, 2.5 * row[one] / whole) for one in chosen])
    agree(layer, x, found, layer(x, context()))
    assert any([one for one, _ in row] != ranked(plain, 2) for row, plain in zip(found, logits))


def served(visits: list[list[int]], capacity: int, order: list[int]) -> set[tuple[int, int]]:
    """(token, choice) that get a place: first choices of all tokens in `order`, then second ones (GShard's algorithm 1)."""
    full, found = [0] * E, set()
    for choice in range(len(visits[0])):
        for token in order:
            expert = visits[token][choice]
            if expert < E and full[expert] < capacity:
                full[expert] += 1
                found.add((token, choice))
    return found


@pytest.mark.parametrize("policy", ["position", "probs"])
@pytest.mark.parametrize(("router", "k"), [("switch", 1), ({"kind": "softmax", "top_k": 2}, 2)])
def test_a_capacity_drops_by_position_or_by_weight(router: Any, k: int, policy: str) -> None:
    layer = layer_of(router=router, capacity_factor=0.6, token_drop_policy=policy)
    x = inputs(3).requires_grad_()
    visits = top(layer, x, k, normalize=k > 1)
    capacity = math.ceil(0.6 * k * T / E)
    largest = logits_of(layer, x).softmax(-1).amax(-1).tolist()
    order = sorted(range(T), key=lambda token: -largest[token]) if policy == "probs" else list(range(T))
    kept = served([[expert for expert, _ in row] for row in visits], capacity, order)
    assert len(kept) < k * T
    left = [[one for choice, one in enumerate(row) if (token, choice) in kept] for token, row in enumerate(visits)]
    seen = context()
    agree(layer, x, left, layer(x, seen))
    counts = seen.routing[0]
    assert counts[E] == k * T - len(kept) and counts[:E].sum() == k * T and counts[E + 2] == T
    with torch.no_grad():  # outside training nothing is dropped
        torch.testing.assert_close(layer(x, context()), looped(layer, x, visits), rtol=1e-4, atol=1e-4)


def test_gshard_visits_the_second_expert_at_random_in_training_alone() -> None:
    layer, x = layer_of(router="gshard", capacity_factor=1.0), inputs(4).requires_grad_()
    both = top(layer, x, 2)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, context(5)) * 0 + layer(x, context()), looped(layer, x, both))
    drawn = torch.rand(T, generator=torch.Generator().manual_seed(5 * 65_537))
    asked = [[a, b if 2 * weight > drawn[token] else E] for token, ((a, _), (b, weight)) in enumerate(both)]
    assert any(row[1] == E for row in asked) and any(row[1] < E for row in asked)
    kept = served(asked, math.ceil(2 * T / E), list(range(T)))
    left = [[one for choice, one in enumerate(row) if (token, choice) in kept] for token, row in enumerate(both)]
    seen = context(5)
    agree(layer, x, left, layer(x, seen))
    assert seen.routing[0][E] == sum(expert < E for row in asked for expert in row) - len(kept)


def test_glam_visits_both() -> None:
    layer, x = layer_of(router={"kind": "gshard", "random_second": False}), inputs().requires_grad_()
    agree(layer, x, top(layer, x, 2), layer(x, context(5)))


def test_hash_goes_by_the_token_alone() -> None:
    layer, x = layer_of(router="hash"), inputs().requires_grad_()
    assert not hasattr(layer, "router")
    seen = context()
    ids = mixed(seen.tokens.flatten(), 0) % E
    agree(layer, x, [[(int(one), torch.ones(()))] for one in ids], layer(x, seen))
    wide = torch.bincount(mixed(torch.arange(60_000), 1) % E, minlength=E)
    assert wide.min() > 9_500 and wide.max() < 10_500
    with pytest.raises(SpecError, match="reads token ids"):
        layer(x, Causal(torch.zeros(SEQUENCES, LENGTH)))


def test_experts_choose_their_tokens() -> None:
    layer, x = layer_of(router={"kind": "expert_choice", "experts_per_token": 3}), inputs().requires_grad_()
    shares, visits = logits_of(layer, x).softmax(-1), [[] for _ in range(T)]
    for expert in range(E):
        for token in ranked(shares[:, expert], T * 3 // E):
            visits[token].append((expert, shares[token, expert]))
    seen = context()
    agree(layer, x, visits, layer(x, seen))
    assert seen.routing[0][:E].tolist() == [T * 3 // E] * E
    assert seen.routing[0][E] == sum(not row for row in visits)


def test_soft_slots_are_mixtures_of_a_sequence() -> None:
    layer, x = layer_of(router={"kind": "soft", "slots": 2}), inputs().requires_grad_()
    made = []
    for sequence in x:
        logits = F.linear(sequence, layer.router.weight)  # [S, E * 2]
        slots = logits.softmax(0).T @ sequence
        out = torch.stack([gated(slot, layer.gate_up.weight[at // 2], layer.down.weight[at // 2]) for at, slot in enumerate(slots)])  # fmt: skip
        made.append(logits.softmax(1) @ out)
    expected, own = torch.stack(made), layer(x, context())
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    weights = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(own.square().sum(), weights), torch.autograd.grad(expected.square().sum(), weights)
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("gate", [False, True])
def test_shared_experts_are_one_that_every_token_visits(gate: bool) -> None:
    layer, x = layer_of(num_shared_experts=2, shared_gate=gate), inputs()
    shared = gated(x, layer.shared_gate_up.weight, layer.shared_down.weight)
    if gate:
        shared = shared * F.linear(x, layer.shared_weight.weight).sigmoid()
    expected = looped(layer, x, top(layer, x, 2)) + shared
    torch.testing.assert_close(layer(x, context()), expected, rtol=1e-4, atol=1e-4)


def test_jitter_changes_what_the_router_sees_in_training_alone_and_repeats() -> None:
    layer, plain = layer_of(jitter=0.5), layer_of()
    x = inputs()
    assert torch.equal(layer(x, context()), plain(x, context()))
    assert torch.equal(layer(x, context(3)), layer(x, context(3)))
    assert not torch.equal(layer(x, context(3)), layer(x, context(4)))
    draw = torch.Generator().manual_seed(3 * 65_537)
    noise = 1 + 0.5 * (2 * torch.rand(T, D, generator=draw) - 1)
    visits = top(plain, x * noise.view_as(x), 2)
    torch.testing.assert_close(layer(x, context(3)), looped(layer, x, visits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"router": {"kind": "softmax", "top_k": 7}}, "sends a token to 7 of 6 experts"),
        ({"router": {"kind": "sigmoid", "num_groups": 4}}, "num_groups 4 does not divide 6 experts"),
        ({"router": {"kind": "sigmoid", "top_k": 3, "num_groups": 3}}, "too few for top_k 3"),
        ({"router": {"kind": "sigmoid", "num_groups": 6}}, "groups of 1 experts are too small"),
        ({"router": "switch", "balance": [{"kind": "bias"}]}, "'switch' chooses without a bias"),
        ({"router": "soft", "balance": [{"kind": "aux_loss"}]}, "'soft' balances by itself"),
        ({"router": "expert_choice", "capacity_factor": 1.0}, "'expert_choice' balances by itself"),
        (
            {"router": "hash", "balance": ["aux_loss"]},
            "'hash' fixes a token's expert by its id: it has no scores to balance",
        ),
        ({"router": "hash", "balance": ["z_loss", "bias"]}, r"leave balance \(z_loss, bias\) out"),
        ({"router": "hash", "jitter": 0.1}, "no input that jitter could change"),
        ({"balance": [{"kind": "device_loss", "devices": 4}]}, "devices 4 does not divide 6 experts"),
        ({"balance": ["bias", "bias"]}, "two balances move one bias"),
        ({"shared_gate": True}, "shared_gate needs num_shared_experts"),
    ],
)
def test_what_does_not_fit_together_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        MoE.read({"kind": "moe", "intermediate_size": 5, "num_experts": E, **options})
