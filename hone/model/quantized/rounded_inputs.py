"""A linear with quantized weights whose inputs are rounded, too: W8A8, W4A8, fp8 and 4-bit floats.

Shapes: M tokens, N output features, K input features.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.scheme import Scheme
from hone.ops.moe.weights import Rounding, block_of
from hone.ops.rounding.inputs import encode, round_inputs, tensors_of


class RoundedInputs(Dequantizing):
    """y = Q(x) W^T + b with W as in `dequantizing` and inputs rounded by Q: products of codes for int8 and fp8 on a GPU, simulated otherwise. Format: compressed-tensors.

    Products of codes have one scale per row of W and one per token or for all inputs, or e4m3 blocks of 128 (tests compare
    them with the simulated ones). Simulated means that the rounded values
    are multiplied in x's dtype: the error is that of a quantized product, the speed is not.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, *, scheme: Scheme) -> None:
        super().__init__(in_features, out_features, bias, scheme=scheme)
        assert scheme.activations is not None, f"{scheme} does not round inputs"
        self.rounding = scheme.activations
        self.given = tuple(tensors_of(self.rounding))
        for suffix, dtype in tensors_of(self.rounding).items():
            self.register_buffer(suffix, torch.empty(1, dtype=dtype))

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """As `Dequantizing.load`. Raises ArtifactError when the parts, which read one input, have different input scales."""
        super().load(parts)
        for suffix in self.given:
            first = parts[0][suffix]
            if any(not torch.equal(part[suffix], first) for part in parts):
                found = ", ".join(f"{float(part[suffix]):g}" for part in parts)
                raise ArtifactError(
                    f"projections of one input have different {suffix}: {found}",
                    fix="calibrate them together: they are one product here",
                )
            setattr(self, suffix, first)

    @property
    def integers(self) -> frozenset[str]:
        """Suffixes of the checkpoint tensors that hold codes."""
        return super().integers | {"input_zero_point"}

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """As `Dequantizing.parts`; every part has the scales of the inputs."""
        return [part | {suffix: getattr(self, suffix).clone() for suffix in self.given} for part in super().parts(rows)]

    @property
    def rounding_of_experts(self) -> Rounding | None:
        """What a kernel for all experts rounds inputs to: 8-bit codes with a scale a token, found at run time; None: no kernel does."""
        own = self.rounding
        plain = own.dynamic and own.symmetric and own.per == "token" and own.bits == 8 and self.bias is None
        return ("int8" if own.number == "int" else "fp8" if own.number == "e4m3" else None) if plain else None

    @property
    def stacks(self) -> bool:
        """Whether a kernel multiplies such weights of all experts at once (`Dequantizing.stacks`), which also rounds their inputs."""
        scheme = self.scheme
        integers = (scheme.number, scheme.scales) == ("int", "float") and scheme.symmetric and scheme.bits in (4, 8)
        fits = block_of(self.in_features, scheme.num_groups(self.in_features)) > 0
        plain = integers and fits and not scheme.permuted
        return (plain or super().stacks_whole_inputs) and self.rounding_of_experts is not None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] float -> [..., N] in x's dtype."""
        given = {suffix: getattr(self, suffix) for suffix in self.given}
        kind = self._codes_kind(x)
        if kind is not None:
            return self._code_product(x, kind, given.get("input_scale"))
        if self._integers(x):
            return self._integer_product(x, given)
        values, scales = round_inputs(x, self.rounding, given)
        if scales is None:
            return self._product(values, self.bias)
        out = (self._product(values, None) * scales).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)

    def _codes_kind(self, x: Tensor) -> Literal["fp8", "int8"] | None:
        """The numbers of both sides where a GPU's kernel multiplies them as codes (`hone.ops.fp8_linear`): symmetric, with one
        scale per row of W and one per token or for all inputs, or e4m3 in blocks of 128; None elsewhere."""
        scheme, rounding = self.scheme, self.rounding
        pair = (scheme.number, rounding.number, scheme.bits, rounding.bits)
        if pair not in (("e4m3", "e4m3", 8, 8), ("int", "int", 8, 8)) or not (scheme.symmetric and rounding.symmetric):
            return None
        integer = scheme.number == "int"
        if rounding.per == "group":
            plain = rounding.group_size == 128 and rounding.scales == "float" and not integer
            return "fp8" if plain and self._has_blocks_of_codes(x) else None
        fits = self.scales.shape[1] == 1 and scheme.block is None and scheme.scales == "float"
        return ("int8" if integer else "fp8") if fits and self._runs_codes(x, integer=integer) else None

    def _integers(self, x: Tensor) -> bool:
        """Whether weights and inputs are 8-bit integers that `torch._int_mm` multiplies fast, on a GPU, within its limits of
        shapes; on CPUs it can be 20 times as slow as a float product (EPYC without VNNI)."""
        scheme, rounding = self.scheme, self.rounding
        plain = scheme.number == "int" and scheme.bits == 8 and scheme.symmetric and self.scales.shape[1] == 1
        if not plain or rounding.number != "int" or rounding.bits != 8 or rounding.per == "group":
            return False
        fits = x.numel() > 16 * self.in_features and self.in_features % 8 == 0 and self.out_features % 8 == 0
        return x.is_cuda and fits

    def _integer_product(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        """The product with exact sums: codes in 32 bits, then both scales."""
        codes, scales, points = encode(x, self.rounding, given)
        weight = self._codes(slice(None))
        sums = torch._int_mm(codes.to(torch.int8).reshape(-1, self.in_features), weight.T)
        if points is not None:
            sums = sums - points.to(torch.int32).reshape(-1, 1) * weight.sum(1, dtype=torch.int32)
        sums = sums.view(*x.shape[:-1], self.out_features).to(scales.dtype)
        out = (sums * scales * self.scales.view(-1).to(scales.dtype)).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)
