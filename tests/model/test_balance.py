"""Each balance against its paper's formula in loops, and what their gradients and the bias do to a skewed router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hone.model.balance import BALANCES
from hone.model.routers.base import Seen
from hone.model.routers.routes import ByToken
from hone.model.routers.sigmoid import Sigmoid
from hone.model.routers.softmax import Softmax

SEQUENCES, LENGTH, E, K = 3, 5, 6, 2
T = SEQUENCES * LENGTH


def routed(router: Any = Softmax, skew: float = 0.0, seed: int = 0, bias: Tensor | None = None) -> tuple[Seen, ByToken]:
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(seed))
    logits[:, 0] += skew
    seen = Seen(logits.requires_grad_(), E, SEQUENCES, bias)
    return seen, router(kind="x", top_k=K).route(seen)


def shares_of(seen: Seen, router: Any) -> Tensor:
    assert seen.logits is not None
    if router is Softmax:
        return seen.logits.softmax(-1)
    scores = seen.logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def asks(routes: ByToken, tokens: range, expert: int) -> int:
    return sum(expert in routes.ids[token].tolist() for token in tokens)


def expected(kind: str, options: dict[str, Any], seen: Seen, routes: ByToken, shares: Tensor) -> Any:
    everyone = range(T)
    if kind == "aux_loss":
        return E * sum(asks(routes, everyone, e) / T * shares[:, e].mean() for e in range(E))
    if kind == "z_loss":
        return sum(row.exp().sum().log() ** 2 for row in seen.logits) / T  # type: ignore[union-attr]
    if kind == "sequence_loss":
        whole = 0.0
        for one in range(SEQUENCES):
            tokens = range(one * LENGTH, (one + 1) * LENGTH)
            often = [E / (K * LENGTH) * asks(routes, tokens, e) for e in range(E)]
            whole = whole + sum(often[e] * shares[tokens.start : tokens.stop, e].mean() for e in range(E))
        return whole / SEQUENCES
    groups = [range(d * 2, d * 2 + 2) for d in range(3)]
    probability = [sum(shares[:, e].mean() for e in group) for group in groups]
    if kind == "device_loss":
        often = [sum(E / (K * T) * asks(routes, everyone, e) for e in group) / len(group) for group in groups]
    else:
        sent = [sum(any(e in group for e in routes.ids[token].tolist()) for token in everyone) for group in groups]
        often = [3 / (options["top_devices"] * T) * count for count in sent]
    return sum(a * b for a, b in zip(often, probability))


@pytest.mark.parametrize("router", [Softmax, Sigmoid])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("aux_loss", {}),
        ("z_loss", {}),
        ("sequence_loss", {}),
        ("device_loss", {"devices": 3}),
        ("communication_loss", {"devices": 3, "top_devices": 2}),
    ],
)
def test_a_loss_is_its_formula(kind: str, options: dict[str, Any], router: Any) -> None:
    seen, routes = routed(router)
    one = BALANCES.read({"kind": kind, "weight": 0.5, **options})
    loss = one.loss(seen, routes)
    wanted = 0.5 * expected(kind, options, seen, routes, shares_of(seen, router))
    torch.testing.assert_close(loss, wanted)
    own, other = (torch.autograd.grad(found, seen.logits, retain_graph=True)[0] for found in (loss, wanted))
    torch.testing.assert_close(own, other)


@pytest.mark.parametrize("kind", ["aux_loss", "sequence_loss", "device_loss", "communication_loss"])
def test_a_loss_pushes_down_the_expert_that_all_ask_for(kind: str) -> None:
    seen, routes = routed(skew=3.0)
    BALANCES.read({"kind": kind}).loss(seen, routes).backward()
    assert seen.logits is not None and seen.logits.grad is not None
    assert seen.logits.grad[:, 0].mean() > 0


def test_losses_count_what_was_asked_for_before_drops() -> None:
    seen, routes = routed(skew=3.0)
    for kind in ("aux_loss", "sequence_loss", "device_loss", "communication_loss"):
        one = BALANCES.read(kind)
        torch.testing.assert_close(one.loss(seen, routes.within(2, by_score=False)), one.loss(seen, routes))


def test_the_bias_moves_by_its_rate_towards_equal_loads_and_reaches_them() -> None:
    one = BALANCES.read({"kind": "bias", "rate": 0.1})
    moved = one.moved(torch.zeros(3), torch.tensor([4.0, 1.0, 1.0]))
    torch.testing.assert_close(moved, torch.tensor([-0.1, 0.1, 0.1]))
    assert one.loss(*routed()) is None
    bias = torch.zeros(E)
    one = BALANCES.read({"kind": "bias", "rate": 0.02})
    spread = []
    for _ in range(60):
        loads = sum(routed(Sigmoid, skew=2.0, seed=seed, bias=bias)[1].loads for seed in range(8))
        spread.append(float(loads.max() / loads.double().mean()))
        bias = one.moved(bias, loads)
    assert spread[0] > 1.8 and spread[-1] < 1.2
