"""AdamW with both moments in 8 bits: blocks of 256 numbers share a scale, and a code of 256 values spans seven decades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.cost.dims import ModelDims
from hone.cost.train.update import ADAMW_MOVED_BYTES, ADAMW_OPS, ADAMW_STATE_BYTES, UpdateCost, layer_matrix_params
from hone.train.optimizers.adamw import AdamWRule
from hone.train.optimizers.base import Entry, Group, Optimizer, Parameter, Rule, by_decay

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")

BLOCK = 256
"""Numbers per scale."""

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""The moments, and whether their numbers have signs."""

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Weights whose moments are in float32 at a time: fits a core's cache on a CPU, keeps a GPU busy."""

STATE_BYTES = 2 + 2 * 4 / BLOCK
MOVED_BYTES = 180
"""Bytes per weight: each of about 25 element-wise operations of a step reads and writes 4 to 12."""

CHUNK_OPS = 44
"""Kernels that the step of a chunk starts, beside views of what is there."""

WORK_BYTES = 40
"""Bytes per weight of a chunk: both moments, their codes as integers, temporaries."""


class AdamW8bit(Optimizer):
    """AdamW with block-wise dynamic 8-bit moments: 2 bytes per weight instead of 8. Dettmers et al. 2021, arXiv:2110.02861."""

    paper: ClassVar[str] = "arXiv:2110.02861"
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the running mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of squared gradients.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    min_elements: int = Field(4096, ge=0, description="Weights with fewer elements have 32-bit moments.")
    quantize_embedding: bool = Field(
        False, description="Whether the embedding's moments have 8 bits too; in the paper they have 32."
    )

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """Large weights in 8 bits; small ones, and the embedding, in 32."""
        small = [name for name, one in parameters.items() if not self._is_quantized(one)]
        large = [name for name in parameters if name not in set(small)]
        options = self.beta1, self.beta2, self.eps
        return [
            *by_decay(parameters, large, AdamW8bitRule(*options), self.weight_decay),
            *by_decay(parameters, small, AdamWRule(*options), self.weight_decay),
        ]

    def _is_quantized(self, parameter: Parameter) -> bool:
        numbers = 1
        for size in parameter.shape:
            numbers *= size
        return numbers >= self.min_elements and (parameter.kind != "embedding" or self.quantize_embedding)

    def cost(self, dims: ModelDims, dtype: str, device: str) -> UpdateCost:
        """Cost with the groups of `groups`; a matrix of a layer is large, other weights but embedding and head are small."""
        sizes = [rows * columns for layer in dims.layers for rows, columns in layer.matmuls]
        large = [size for size in sizes if size >= self.min_elements]
        eight = layer_matrix_params(dims) * sum(large) / max(sum(sizes), 1)
        tables = (not dims.tie_embeddings) + self.quantize_embedding
        large += [dims.vocab_size * dims.hidden_size] * tables
        eight += dims.vocab_size * dims.hidden_size * tables
        rest = dims.num_params - eight
        chunk = CHUNK["cuda" if device.startswith("cuda") else "cpu"]
        return UpdateCost(
            state_bytes=STATE_BYTES * eight + ADAMW_STATE_BYTES * rest,
            moved_bytes=MOVED_BYTES * eight + ADAMW_MOVED_BYTES * rest,
            num_ops=ADAMW_OPS + round(CHUNK_OPS * max(eight / chunk, len(large))),
            work_bytes=WORK_BYTES * min(chunk, max(large, default=0)),
            op_bytes=4.0 * min(chunk, max(large, default=0)) or None,
        )


@dataclass(frozen=True)
class AdamW8bitRule(Rule):
    """AdamW's step in float32, with moments decoded before it and encoded after it, chunk by chunk."""

    beta1: float
    beta2: float
    eps: float
    elements_per_entry: ClassVar[Mapping[str, int]] = {"exp_avg_scales": BLOCK, "exp_avg_sq_scales": BLOCK}

    def start(self, weight: Tensor, parameter: Parameter) -> dict[str, Tensor]:
        """Codes of zeros, uint8 [numbers], and a scale per block, float32 [blocks], for each moment."""
        numbers, state = weight.numel(), {}
        for name, signed in MOMENTS:
            zero = int((_table(signed, weight.device) == 0).nonzero())
            state[f"{name}_codes"] = torch.full((numbers,), zero, dtype=torch.uint8, device=weight.device)
            state[f"{name}_scales"] = torch.zeros(-(-numbers // BLOCK), device=weight.device)
        return state

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """See `AdamWRule.step`."""
        for entry in entries:
            weight, grad = entry.weight.view(-1), entry.grad.reshape(-1)
            size = CHUNK[weight.device.type]
            for start in range(0, len(weight), size):
                here = slice(start, start + size)
                blocks = slice(start // BLOCK, (start + size) // BLOCK)
                chunk = {
                    name: tensor[here if name.endswith("codes") else blocks] for name, tensor in entry.state.items()
                }
                self._step(weight[here], grad[here], chunk, count, lr, weight_decay)

    def _step(
        self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], count: int, lr: float, weight_decay: float
    ) -> None:
        mean, square = self.decode(state).values()
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        root = square.sqrt().div_((1 - self.beta2**count) ** 0.5).add_(self.eps)
        weight.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / (1 - self.beta1**count))
        del root
        for name, encoded in self.encode({"exp_avg": mean, "exp_avg_sq": square}).items():
            state[name].copy_(encoded)

    def decode(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Both moments, float32 [numbers]."""
        return {
            name: dequantize(state[f"{name}_codes"], state[f"{name}_scales"], signed=signed) for name, signed in MOMENTS
        }

    def encode(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Codes and scales of both moments, in blocks from the first number on."""
        state = {}
        for name, signed in MOMENTS:
            state[f"{name}_codes"], state[f"{name}_scales"] = quantize(values[name], signed=signed)
        return state


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes uint8 [numbers], scales float32 [blocks]) of float32 `values` [numbers]: the nearest code to each divided by its block's maximum.

    Unsigned, a number above zero never becomes zero: a zero second moment would divide the first by eps alone.
    """
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    shares = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).view(-1)
    first, borders = _first_codes(signed, values.device), _borders(signed, values.device)
    codes = first.index_select(0, (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    codes += shares > borders.index_select(0, codes)
    return codes.to(torch.uint8)[: len(values)], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The float32 values [numbers] of codes from `quantize`."""
    values = _table(signed, codes.device).index_select(0, codes.int())
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    return padded.mul_(scales[:, None]).view(-1)[: len(codes)]


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of dynamic tree quantization, ascending; float32.

    A value's leading zero bits are its decade, 10^-6 to 1; the bits after them divide the decade's [0.1, 1] into equal
    bins, whose centers are the values. Fewer zeros leave more bits: 64 bins in the first decade, 1 in the last.
    Signed, each bin is on both sides of zero; unsigned, the sign's bit doubles the bins. Zero and one are added.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        bins = 2 ** (6 - decade) * (1 if signed else 2)
        for place in range(bins):
            value = 10.0**-decade * (0.1 + 0.9 * (place + 0.5) / bins)
            values += [value, -value] if signed else [value]
    assert len(values) == 256, f"{len(values)} values, expected 256"
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _borders(signed: bool, device: torch.device) -> Tensor:
    """Above border n the nearest code is n + 1: midpoints between neighbours, and infinity; unsigned, the first is zero."""
    table = _table(signed, device)
    borders = torch.cat([(table[1:] + table[:-1]) / 2, table.new_full((1,), float("inf"))])
    if not signed:
        borders[0] = 0.0
    return borders


@cache
def _first_codes(signed: bool, device: torch.device) -> Tensor:
    """The code of the smallest number among those with upper 16 bits n, int32 [65536].

    Such numbers are so close that at most one border is between them: the codes of all are this one or the next.
    """
    upper = torch.arange(1 << 16, dtype=torch.int64, device=device)
    bits = (upper << 16) | torch.where(
        upper >= 1 << 15, 0xFFFF, 0
    )  # of negative numbers the smallest is the farthest from zero
    smallest = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    return torch.bucketize(smallest.nan_to_num(0.0), _borders(signed, device)[:-1], out_int32=True)
