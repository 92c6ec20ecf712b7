"""Each feed-forward against its formula, and the gradient through it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hone.model.block import Placement
from hone.model.context import Causal
from hone.model.feed_forwards import FEED_FORWARDS
from hone.model.linear import make_dense


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "activation"), [("swiglu", F.silu), ("geglu", tanh_gelu)])
def test_a_gated_layer_is_its_formula(
    kind: str, activation: Callable[[torch.Tensor], torch.Tensor], bias: bool
) -> None:
    spec = FEED_FORWARDS.read({"kind": kind, "intermediate_size": 12, "bias": bias})
    layer = spec.build(Placement(8, 0, "layers.0.feed_forward", 1e-6, make_dense)).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    assert sum(parameter.numel() for parameter in layer.parameters()) == spec.num_params(8)
    x = torch.randn(2, 5, 8, generator=draw, dtype=torch.float64)
    gate, up = layer.gate_up.weight.split(12)
    gate_bias, up_bias = layer.gate_up.bias.split(12) if bias else (None, None)
    inner = activation(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
    made = layer(x, Causal(torch.zeros(2, 5)))
    torch.testing.assert_close(made, F.linear(inner, layer.down.weight, layer.down.bias))
    inputs = x[:1, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, Causal(torch.zeros(1, 2))), (inputs,))
