"""Linear layers as a slot: mixers and feed-forwards ask a maker for theirs and never know how the weights are stored.

What a linear must offer, beside `forward(x [..., in]) -> [..., out]`:
- a constructor `(in_features, out_features, bias, **options)` that works on the meta device;
- `load(parts)`: takes the tensors of one or more checkpoint modules, each `{suffix: tensor}` with the module's own
  prefix removed, and stacks them on output rows (q, k, v; gate, up);
- `parts(rows)`: gives them back, split at `rows` output rows each. `load(parts(rows))` changes nothing;
- `integers`: the suffixes that hold integers; the others hold floats.
Loading replaces the tensors, so it decides their device and dtype; `load` on the meta device materialises the layer.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.table import Table
from hone.ops import linear

LINEARS = Table(
    "linear",
    {
        "dense": "hone.model.linear:Dense",
        "packed_int": "hone.model.quantized.packed_int:PackedInt",
        "dequantizing": "hone.model.quantized.dequantizing:Dequantizing",
    },
)


class MakeLinear(Protocol):
    """Gives a mixer or feed-forward its linear; `name` is the dotted path in the decoder ('layers.3.mixer.qkv')."""

    def __call__(self, name: str, in_features: int, out_features: int, bias: bool) -> nn.Module: ...


def make_dense(name: str, in_features: int, out_features: int, bias: bool) -> Dense:
    """The maker of an unquantized model."""
    return Dense(in_features, out_features, bias)


class Dense(nn.Module):
    """y = x W^T + b with the weights as they are."""

    paper: ClassVar[str] = ""
    integers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and not torch.is_grad_enabled():  # a training step stays plain torch, which compiles and fuses it
            return linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Stacks `parts`, each {"weight": [rows, in], "bias": [rows] when this layer has one}."""
        self.weight = nn.Parameter(_stack([part["weight"] for part in parts]), self.weight.requires_grad)
        assert self.weight.shape == (self.out_features, self.in_features), f"stacked to {tuple(self.weight.shape)}"
        if self.bias is not None:
            self.bias = nn.Parameter(_stack([part["bias"] for part in parts]), self.bias.requires_grad)

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The tensors split at `rows` output rows each, as views."""
        assert sum(rows) == self.out_features, f"{rows} do not add up to {self.out_features}"
        weights = self.weight.detach().split(rows)
        if self.bias is None:
            return [{"weight": weight} for weight in weights]
        biases = self.bias.detach().split(rows)
        return [{"weight": weight, "bias": bias} for weight, bias in zip(weights, biases, strict=True)]

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """What `load` expects: the shape of every tensor of each part."""
        shapes: list[dict[str, tuple[int, ...]]] = [{"weight": (count, self.in_features)} for count in rows]
        if self.bias is not None:
            for shape, count in zip(shapes, rows, strict=True):
                shape["bias"] = (count,)
        return shapes


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
