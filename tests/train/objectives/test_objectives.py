"""What each objective sums over the targets: values and gradients against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.train import OBJECTIVES
from tests.train.conftest import SHAPE

VOCAB = 40


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their targets [3, 20], some of them ignored."""
    tokens = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = targets[1, 3:7] = -100
    return tokens, targets


def model(seed: int) -> Decoder:
    made = build(SHAPE.config(VOCAB), seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)  # so that the distributions are far from uniform
    return made


def gradients(one: Decoder, loss: torch.Tensor) -> list[torch.Tensor]:
    one.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in one.parameters()]


def test_next_token_is_the_cross_entropy_summed_over_the_targets() -> None:
    one, (tokens, targets) = model(0), batch()
    objective = OBJECTIVES.read("next_token")
    found = objective.total(one, one.hidden(tokens, Causal(tokens)), targets, None, None)
    expected = F.cross_entropy(one(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(found, expected)
    assert objective.count(targets.numpy()) == 3 * 19 - 4
    for found_one, expected_one in zip(gradients(one, found), gradients(one, expected), strict=True):
        torch.testing.assert_close(found_one, expected_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("alpha", "temperature"), [(1.0, 1.0), (0.7, 2.0)])
def test_distill_is_the_weighted_divergence_from_the_teacher(alpha: float, temperature: float) -> None:
    one, teacher, (tokens, targets) = model(0), model(1), batch()
    objective = OBJECTIVES.read({"kind": "distill", "alpha": alpha, "temperature": temperature})
    with torch.no_grad():
        taught, wanted = teacher.hidden(tokens, Causal(tokens)), teacher(tokens)
    found = objective.total(one, one.hidden(tokens, Causal(tokens)), targets, teacher, taught)
    logits, kept = one(tokens).flatten(0, 1), (targets != -100).flatten()
    softened = [F.log_softmax(part[kept] / temperature, -1) for part in (logits, wanted.flatten(0, 1))]
    apart = F.kl_div(*softened, log_target=True, reduction="sum")
    plain = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    expected = alpha * temperature**2 * apart + (1 - alpha) * plain
    torch.testing.assert_close(found, expected)
    for found_one, expected_one in zip(gradients(one, found), gradients(one, expected), strict=True):
        torch.testing.assert_close(found_one, expected_one, rtol=1e-4, atol=1e-4)
