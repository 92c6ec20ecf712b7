"""bitsandbytes' 4-bit layout (NF4, FP4), with the largest magnitude of each block as scale, plain or quantized again."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import ArtifactError
from hone.model.quantized.layouts.base import Entry, Layout
from hone.model.quantized.scheme import Scheme, Stored
from hone.ops.nf4.reference import NESTED_BLOCK, Nested, dynamic_map, table
from hone.ops.nf4.reference import quantize as rounded

STATE_BYTES = 256
"""Length of the JSON that hone writes: padded with spaces, so that a file's size is known in advance."""


class Bitsandbytes4(Layout):
    """`weight` uint8 [N K / 2, 1]: indices into a table of 16 values, row by row, the first of two in the high nibble.

    `weight.absmax` float32 [N K / block], `weight.quant_map` float32 [16] and `weight.quant_state.bitsandbytes__nf4`, a
    JSON object as uint8. Nested: `absmax` is uint8 indices into `weight.nested_quant_map` float32 [256], times
    `weight.nested_absmax` float32 [N K / block / 256], plus the JSON's `nested_offset`. Blocks lie within rows here.
    Source: bitsandbytes 0.50.2, `functional.QuantState`; Dettmers et al. 2023, arXiv:2305.14314.
    """

    method = "bitsandbytes"

    def __init__(self, number: str, nested: bool) -> None:
        self.number = number
        self.nested = nested
        self.state = f"weight.quant_state.bitsandbytes__{number}"
        self.integers = frozenset({"weight", self.state, *(["weight.absmax"] if nested else [])})
        self.any_length = frozenset({self.state})

    def problem(self, scheme: Scheme) -> str | None:
        return None if scheme.number == self.number and scheme.strategy == "group" else scheme.described

    def tensors(self, scheme: Scheme, rows: int, columns: int, scale_dtype: torch.dtype) -> dict[str, Entry]:
        blocks = rows * columns // scheme.group_size
        found: dict[str, Entry] = {
            "weight": (torch.uint8, (rows * columns // 2, 1)),
            "weight.absmax": (torch.uint8 if self.nested else torch.float32, (blocks,)),
            "weight.quant_map": (torch.float32, (16,)),
            self.state: (torch.uint8, (STATE_BYTES,)),
        }
        if self.nested:
            found["weight.nested_absmax"] = (torch.float32, (-(-blocks // NESTED_BLOCK),))
            found["weight.nested_quant_map"] = (torch.float32, (256,))
        return found

    def write(self, stored: Stored) -> dict[str, Tensor]:
        indices = (stored.codes + 8).view(torch.uint8).flatten()
        part = {
            "weight": ((indices[0::2] << 4) | indices[1::2]).unsqueeze(1),
            "weight.absmax": stored.scales.flatten(),
            "weight.quant_map": table(self.number, torch.device("cpu")).clone(),  # every module has its own in a file
        }
        return part | stored.raw[0]

    def read(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> Stored:
        packed, state = self.described(scheme, part, columns)
        indices = torch.stack((packed >> 4, packed & 15), dim=-1).view(-1, columns)
        kept = [self.state]
        scales = part["weight.absmax"]
        if self.nested:
            kept += ["weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"]
            scales = nested(part, state).unnested(scales)
        raw = {suffix: part[suffix] for suffix in kept}
        return Stored(scheme, indices.view(torch.int8) - 8, scales.view(len(indices), -1), raw={0: raw})

    def described(self, scheme: Scheme, part: dict[str, Tensor], columns: int) -> tuple[Tensor, dict[str, Any]]:
        """(the bytes of a module's codes, its quant_state). Raises ArtifactError when they are not what `scheme` says."""
        packed, state = part["weight"].flatten(), self._state(part[self.state])
        rows = 2 * len(packed) // columns
        wanted = {"quant_type": self.number, "blocksize": scheme.group_size, "shape": [rows, columns]}
        found = {key: state.get(key) for key in wanted}
        if packed.dtype != torch.uint8 or found != wanted:
            raise ArtifactError(
                f"a weight's quant_state is {found} in {packed.dtype}, the model's is {wanted} in torch.uint8",
                fix="pair the weights with the config.json they were saved with",
            )
        if not torch.equal(part["weight.quant_map"].cpu(), table(self.number, torch.device("cpu"))):
            raise ArtifactError(f"quant_map is not the table of {self.number}", fix="quantize the model again")
        return packed, state

    def _state(self, stored: Tensor) -> dict[str, Any]:
        try:
            state = json.loads(bytes(stored.cpu().tolist()))
        except ValueError:
            raise ArtifactError("a weight's quant_state is no JSON", fix="copy the file again") from None
        if ("nested_offset" in state) != self.nested:
            raise ArtifactError(
                "config.json's bnb_4bit_use_double_quant and a weight's quant_state differ",
                fix="pair the weights with the config.json they were saved with",
            )
        return state


def describe(number: str, shape: tuple[int, int], dtype: torch.dtype, block: int, **nested: Any) -> dict[str, Tensor]:
    """The tensor of a module's `quant_state`, for `Stored.raw`; `dtype` is the weight's before it was quantized."""
    name = str(dtype).removeprefix("torch.")
    values = {"quant_type": number, "blocksize": block, "dtype": name, "shape": list(shape), **nested}
    text = json.dumps(values).ljust(STATE_BYTES).encode()
    assert len(text) == STATE_BYTES, f"{len(text)} bytes of {text!r}"
    return {f"weight.quant_state.bitsandbytes__{number}": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def quantize(weights: Tensor, scheme: Scheme, dtype: torch.dtype) -> Stored:
    """The weights [N, K] of one whole checkpoint module in the form of `scheme`; `dtype` is that of the model's weights."""
    codes, scales = rounded(weights, scheme.number, scheme.group_size)
    part, state = dict[str, Tensor](), dict[str, Any]()
    if scheme.layout.endswith("-nested"):
        part, state, read = nest(scales.flatten())
        scales = read.view_as(scales)
    rows, columns = weights.shape
    part |= describe(scheme.number, (rows, columns), dtype, scheme.group_size, **state)
    return Stored(scheme, codes, scales, raw={0: part})


def nest(absmax: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Scales float32 [n] of one module quantized again: (their tensors, their JSON values, the scales as read back).

    Codes are the nearest values, as in bitsandbytes' CUDA kernel; its CPU kernel first rounds to 65536 steps.
    """
    offset = absmax.mean()
    blocks = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = blocks.abs().amax(1)
    values = dynamic_map().to(absmax.device, copy=True)  # every module has its own in a file
    steps = (blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(1)).clamp_(-1, 1)
    bounds = (values[:-1] + values[1:]) / 2
    codes = torch.bucketize(steps, bounds, out_int32=True).to(torch.uint8).flatten()[: len(absmax)]
    state = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset.item()}
    part = {"weight.absmax": codes, "weight.nested_absmax": largest, "weight.nested_quant_map": values}
    return part, state, nested(part, state).unnested(codes)


def nested(part: dict[str, Tensor], state: dict[str, Any]) -> Nested:
    """The nested scales of a module. Raises ArtifactError for blocks of another length."""
    if state.get("nested_blocksize") != NESTED_BLOCK:
        raise ArtifactError(
            f"nested_blocksize is {state.get('nested_blocksize')}, bitsandbytes writes {NESTED_BLOCK}",
            fix="quantize the model again",
        )
    largest = part["weight.nested_absmax"]
    return Nested(part["weight.nested_quant_map"], largest, torch.full_like(largest, state["nested_offset"]))
