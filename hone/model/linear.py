"""Linear layers as a slot: a maker builds the linears of mixers and feed-forwards, dense or quantized.

The interface of a linear, beside `forward(x [..., in]) -> [..., out]`:
- a constructor `(in_features, out_features, bias, **options)` that works on the meta device;
- `load(parts)`: takes the tensors of one or more checkpoint modules, each `{suffix: tensor}` with the module's own
  prefix removed, and stacks them on output rows (q, k, v; gate, up; with experts one expert after another);
- `parts(rows)`: returns them, split at `rows` output rows each. `load(parts(rows))` changes nothing;
- `part_shapes(rows)`: the shapes of what `load` expects;
- `integers`: the suffixes that hold integers; the others hold floats;
- `dequantize(dtype)`: the whole weight as the forward pass multiplies it.
Loading replaces the tensors, with their device and dtype; `load` on the meta device materialises the layer.

A maker can wrap another, as `hone.model.adapters.wrap.adapted` does. `ExpertLinears` makes one of the linears of several experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.table import Table
from hone.model.linear_spec import LinearSpec, Tokens, dense_shapes
from hone.ops import grouped_linear, linear
from hone.ops.dispatch import Choice, choose, locate, runs_kernel
from hone.ops.linear.cpu_weights import CpuWeight, dense_weight
from hone.ops.moe.reference import add_bias
from hone.ops.moe.weights import ExpertWeights, Rounding, block_of, pack_pairs

Part = TypeVar("Part")

LINEARS = Table(
    "linear",
    {
        "dense": "hone.model.linear:Dense",
        "packed_int": "hone.model.quantized.packed_int:PackedInt",
        "dequantizing": "hone.model.quantized.dequantizing:Dequantizing",
        "nf4": "hone.model.quantized.nf4:NF4",
        "low_rank": "hone.model.quantized.low_rank:LowRank",
        "rounded_inputs": "hone.model.quantized.rounded_inputs:RoundedInputs",
        "semi_structured": "hone.model.sparse.semi_structured:SemiStructured",
        "experts": "hone.model.linear:Experts",
    },
)


class MakeLinear(Protocol):
    """Builds the linear that `spec` describes; `name` is the dotted path in the decoder ('layers.3.mixer.qkv', 'embed_tokens', 'lm_head')."""

    def __call__(self, name: str, spec: LinearSpec) -> nn.Module: ...


def make_dense(name: str, spec: LinearSpec) -> nn.Module:
    """The maker of an unquantized model."""
    if isinstance(spec.reads, Tokens):
        return Embedding(spec.in_features, spec.out_features)
    if spec.experts is not None:
        return Experts(spec.in_features, spec.out_features, spec.bias, experts=spec.experts)
    return Dense(spec.in_features, spec.out_features, spec.bias)


class Dense(nn.Module):
    """y = x W^T + b with unquantized weights."""

    paper: ClassVar[str] = ""
    integers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(*self._leading, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(*self._leading, out_features)) if bias else None

    @property
    def _leading(self) -> tuple[int, ...]:
        """Shape of the weight's axes before its rows."""
        return ()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # a training step stays plain torch, which compiles and fuses it
            return linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def on_cpu(self, dtype: torch.dtype, rows: int) -> Choice:
        """How a CPU multiplies `rows` rows of x of `dtype` by this weight."""
        same = dtype if dtype == self.weight.dtype and self.weight.is_contiguous() else None
        shape = {"out_features": self.out_features, "in_features": self.in_features}
        return choose("linear", locate("cpu"), dtype=same, rows=rows, **shape, in_rows=True, plain=True, large=True)

    def cpu_weight(self) -> CpuWeight:
        """The weight for a program of compiled operations (`hone.ops.cpu.program`)."""
        return dense_weight(self.weight.detach(), None if self.bias is None else self.bias.detach())

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Stacks `parts`, each {"weight": [rows, in], "bias": [rows] when this layer has one}."""
        shape = (*self._leading, self.out_features)
        weight = _stack([part["weight"] for part in parts])
        self.weight = nn.Parameter(weight.view(*shape, self.in_features), self.weight.requires_grad)
        if self.bias is not None:
            bias = _stack([part["bias"] for part in parts])
            self.bias = nn.Parameter(bias.view(shape), self.bias.requires_grad)

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The tensors split at `rows` output rows each, as views."""
        weights = self.weight.detach().flatten(0, -2).split(rows)
        if self.bias is None:
            return [{"weight": weight} for weight in weights]
        biases = self.bias.detach().flatten().split(rows)
        return [{"weight": weight, "bias": bias} for weight, bias in zip(weights, biases, strict=True)]

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """What `load` expects: the shape of every tensor of each part."""
        return dense_shapes(rows, self.in_features, bias=self.bias is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`; itself when it has that dtype."""
        return self.weight.to(dtype)


class Experts(Dense):
    """One weight per expert, [E, out_features, in_features]: a token is multiplied with the weights of its experts."""

    def __init__(self, in_features: int, out_features: int, bias: bool, *, experts: int) -> None:
        self._experts = experts
        super().__init__(in_features, out_features, bias)

    @property
    def _leading(self) -> tuple[int, ...]:
        return (self._experts,)

    def forward(self, x: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
        """x [T, in], rows sorted by expert, ends int32 [E] where each expert's rows end (`hone.ops.permute`): [T, out]. Without a bias rows
        may be in pieces, where `starts` and `ends` are int32 [E, n] (`hone.ops.grouped_linear`)."""
        if starts is not None:
            assert self.bias is None, "biases are of rows that are sorted by expert"
            return grouped_linear(x, self.weight, ends, starts=starts)
        y = self.product(x, ends)
        if self.bias is None:
            return y
        return add_bias(y, self.bias, ends)

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        """The same without the bias."""
        return grouped_linear(x, self.weight, ends)


class ExpertLinears(nn.ModuleList):
    """A linear of any kind for each expert, of which every one multiplies its own tokens, one after another.

    `forward` waits for the counts of tokens, so that it is not part of a CUDA graph. Where a GPU has a kernel for their codes,
    `stacked` are the weights of all experts, for layers that compute them at once (`hone.ops.expert_swiglu`). It has the interface of
    a linear but for its constructor, which takes the experts' linears.
    """

    stacked: ExpertWeights | None = None
    """The codes and scales of all experts, of which each expert's own tensors are parts; None where they are apart."""
    _adopted: tuple[Tensor, ...] = ()
    """The codes of each expert in `stacked`."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """As `Experts.forward`. A linear whose expert has no tokens is not called."""
        pieces = x.tensor_split(ends.tolist()[:-1])
        outs = [one(piece) for one, piece in zip(self, pieces, strict=True) if len(piece)]
        return torch.cat(outs) if outs else x.new_empty(0, self[0].out_features)

    @property
    def integers(self) -> frozenset[str]:
        """The suffixes that hold integers, which are one expert's where experts are stored alike (`shared_out`)."""
        return frozenset().union(*(one.integers for one in self))

    def stacks_on(self, device: torch.device) -> bool:
        """Whether a kernel of `device` multiplies the weights of all these experts at once: codes of one kind, as `stack` keeps them."""
        first: Any = self[0]
        if not getattr(first, "stacks", False) or any(type(one) is not type(first) for one in self):
            return False
        if any(one.scheme != first.scheme or one._forward_pre_hooks for one in self):
            return False
        sizes = (int(first.out_features), int(first.in_features))
        case = {"dtype": torch.bfloat16, "visits": 1, "num_experts": len(self), "sizes": sizes}
        return runs_kernel("expert_swiglu", device, **case, kind="codes", plain=True)

    def load_apart(self, device: torch.device) -> bool:
        """Tells experts that are about to be loaded on `device` how to keep their codes; whether they are to be stacked then."""
        self._adopted, self.stacked, together = (), None, self.stacks_on(device)
        for one in self:
            if hasattr(one, "grouped"):
                one.grouped = together
        return together

    def stack(self) -> None:
        """Moves the codes of all experts, which have them on one device, into one tensor, and their scales into another."""
        self._adopted, self.stacked, made = (), None, None
        for index, one in enumerate(self):
            codes, scales = one.plain_codes()
            block = block_of(codes.shape[1], scales.shape[1])
            own = pack_pairs(codes, block) if one.scheme.bits == 4 else codes
            if made is None:
                values = own.new_empty(len(self), *own.shape)
                made = ExpertWeights(values, scales.new_empty(len(self), *scales.T.shape))
            assert made.scales is not None, "codes have scales"
            made.values[index], made.scales[index] = own, scales.T
            one.adopt(made.values[index], made.scales[index])
        biases = [one.bias for one in self if one.bias is not None]
        assert len(biases) in (0, len(self)), "biases of some experts alone"
        self._adopted = tuple(one.codes for one in self)
        self.stacked = made._replace(bias=torch.stack(biases)) if made is not None and biases else made

    def at_once(self) -> ExpertWeights | None:
        """`stacked`, where nothing watches a single expert and each still has its part of it; else None."""
        if self.stacked is None:
            return None
        for one, codes in zip(self, self._adopted, strict=True):
            if one._forward_hooks or one._forward_pre_hooks or one._buffers.get("codes") is not codes:
                return None
        return self.stacked

    @property
    def rounding(self) -> Rounding | None:
        """What `stacked` experts round their inputs to; None: nothing."""
        first: Any = self[0]
        return getattr(first, "rounding_of_experts", None)

    @property
    def alike(self) -> bool:
        """Whether the tensors of one expert fit another's place: all are of one kind and format."""
        first: Any = self[0]
        return all(
            type(one) is type(first) and getattr(one, "scheme", None) == getattr(first, "scheme", None) for one in self
        )

    def tensors_of(self, index: int) -> list[Tensor]:
        """All that one expert computes with, as views, in an order that is the same for all; see `overwritten`."""
        if self.stacked is not None:
            return [one[index] for one in self.stacked if one is not None]
        one = self[index]
        return [tensor.detach() for tensor in (*one.parameters(), *one.buffers())]

    def overwritten(self, index: int) -> None:
        """To be called when `tensors_of` an expert were given other values in place: what was made of the old ones is forgotten."""
        one: Any = self[index]
        if self.stacked is not None and self.stacked.bias is not None:
            one.bias.copy_(self.stacked.bias[index])
        if hasattr(one, "overwritten"):
            one.overwritten()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertLinears:
        """Implements `.to(...)`: where experts have come to a device that multiplies all of them at once, they are stacked anew."""
        super()._apply(fn, recurse)
        self._adopted, self.stacked = (), None
        where = next((one.device for one in self.buffers()), None)
        if where is not None and where.type != "meta" and self.stacks_on(where):
            self.stack()
        return self

    def shared_out(self, parts: Sequence[Part]) -> list[Sequence[Part]]:
        """`parts`, what there is of each checkpoint module, expert by expert: the parts of each."""
        count, left = divmod(len(parts), len(self))
        assert not left, f"{len(parts)} checkpoint modules of {len(self)} experts"
        return [parts[count * expert : count * (expert + 1)] for expert in range(len(self))]

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Takes the tensors of the checkpoint modules, one expert after another."""
        for one, own in zip(self, self.shared_out(parts), strict=True):
            one.load(list(own))

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The tensors of modules of `rows` output rows each."""
        each = zip(self, self.shared_out(rows), strict=True)
        return [part for one, own in each for part in one.parts(list(own))]

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """What `load` expects: the shape of every tensor of each part."""
        each = zip(self, self.shared_out(rows), strict=True)
        return [shapes for one, own in each for shapes in one.part_shapes(list(own))]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights of all experts, [E, out, in]."""
        return torch.stack([one.dequantize(dtype) for one in self])


class Embedding(nn.Module):
    """The vectors of tokens: row `token` of a matrix [V, D], which is also the head's where embeddings are tied. It is loaded and
    taken apart as a linear is."""

    integers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """The matrix of the one checkpoint module."""
        self.weight = nn.Parameter(parts[0]["weight"], self.weight.requires_grad)

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The matrix as a view."""
        return [{"weight": self.weight.detach()}]

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """What `load` expects."""
        return [{"weight": tuple(self.weight.shape)}]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [...] -> [..., D]."""
        return F.embedding(tokens, self.weight)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
