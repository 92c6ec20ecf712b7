"""SwiGLU without gradients: the product and its gate as one operation, unless something watches the product."""

from __future__ import annotations

import torch
from torch import nn

from hone.model.block import Placement
from hone.model.context import Context
from hone.model.feed_forwards.swiglu import SwiGLU
from hone.model.linear import make_dense


def made(*, bias: bool = False) -> nn.Module:
    layer = SwiGLU(intermediate_size=12, bias=bias).build(Placement(8, 0, "layers.0.feed_forward", 1e-6, make_dense))
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def test_without_gradients_it_is_the_same() -> None:
    x = torch.randn(2, 5, 8)
    for bias in (False, True):
        layer = made(bias=bias)
        wanted = layer(x, Context())
        with torch.no_grad():
            torch.testing.assert_close(layer(x, Context()), wanted)


def test_who_watches_the_product_sees_it() -> None:
    layer, seen, x = made(), [], torch.randn(3, 8)
    layer.gate_up.register_forward_hook(lambda module, given, out: seen.append(out))
    with torch.no_grad():
        layer(x, Context())
    torch.testing.assert_close(seen[0], x @ layer.gate_up.weight.detach().T)
