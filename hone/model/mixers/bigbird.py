"""BigBird: blocks of tokens attend to the blocks around them, to a few global blocks, and to a few drawn at random."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hone.base.errors import SpecError
from hone.cost.dims import mean_positions
from hone.model.block import Placement
from hone.model.context import Context, KeyValues, sdpa
from hone.model.mixers.attention import GroupedHeads, GroupedHeadsLayer
from hone.model.rope import Rope
from hone.ops import attend
from hone.ops.attention.masks import Mask, bigbird, documents


class BigBird(GroupedHeads):
    """Window, global and random blocks, the random ones drawn once a layer and head. Zaheer et al. 2020, arXiv:2007.14062.

    The paper's is an encoder (encoder: true): the window reaches to both sides, and half the global blocks stand at
    each end and attend to all. The causal form attends to earlier tokens only. Its random blocks are drawn for
    `max_seq_len` tokens, so that a prefix gets the same blocks as the longer text. Decoding keeps every key: any block
    may be drawn later.
    """

    paper: ClassVar[str] = "arXiv:2007.14062"
    by_layer: ClassVar[bool] = True
    complexity: ClassVar[str] = "O(S block (window + global + random))"

    max_seq_len: int = Field(gt=0, description="Longest input of the causal form, in tokens.")
    block: int = Field(64, ge=16, description="Tokens per block, a power of two.")
    num_window: int = Field(3, gt=0, description="Blocks around (causal: up to) a token's own, itself among them.")
    num_global: int = Field(2, ge=0, description="Blocks that all see.")
    num_random: int = Field(3, ge=0, description="Further blocks drawn for each block of each head.")
    seed: int = Field(0, ge=0, description="Seed of the random blocks, with the layer's index.")
    encoder: bool = Field(False, description="Whether tokens attend to later tokens too, as in the paper.")
    rope: Rope = Field(default_factory=Rope, description="Rotary positions.")

    @model_validator(mode="after")
    def _sizes_fit(self) -> BigBird:
        if self.block & (self.block - 1):
            raise ValueError(f"block {self.block} is no power of two")
        if self.encoder and self.num_window % 2 == 0:
            raise ValueError(
                f"num_window {self.num_window} is even: an encoder's window has equally many blocks on each side"
            )
        return self

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return not self.encoder

    def mixing_flops(self, seq_len: int) -> float:
        """Of the blocks kept; half of a token's own block when causal. An encoder's global blocks attend to all."""
        blocks = self.num_window + self.num_global + self.num_random
        if self.encoder:
            share = min(1.0, self.num_global * self.block / seq_len)  # of the rows
            seen = min(seq_len, self.block * blocks) * (1 - share) + seq_len * share
        else:
            whole = self.block * mean_positions(-(-seq_len // self.block), blocks)
            seen = min(whole - (self.block - 1) / 2, mean_positions(seq_len))
        return 4.0 * self.num_heads * self.head_dim * seen

    def state_values(self, seq_len: int) -> float:
        return 2.0 * self.num_kv_heads * self.head_dim * seq_len

    def build(self, place: Placement) -> BigBirdLayer:
        return BigBirdLayer(self, place)


class BigBirdLayer(GroupedHeadsLayer):
    """The module behind `BigBird`. `forward(x [B, S, D], context) -> [B, S, D]`."""

    def __init__(self, spec: BigBird, place: Placement) -> None:
        super().__init__(spec, place)
        self._masks: dict[
            tuple[int, torch.device], Mask
        ] = {}  # derived from the spec: the last length's, and the longest's

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec = self.spec
        q, k, v = self.rotated_qkv(x, context)
        if context.carry is not None:
            return self.out(self._decode(q, k, v, context).flatten(-2))
        mask = self.mask(x.shape[1], x.device)
        if context.document_ids is not None:
            apart = documents(context.document_ids, causal=not spec.encoder)
            mask = replace(apart, table=mask.table, block=mask.block)
        return self.out(attend(q, k, v, mask, scale=self.scale).flatten(-2))

    def draw(self, context: Context, x: Tensor) -> None:
        self.mask(x.shape[1] if context.carry is None else self.spec.max_seq_len, x.device)

    def mask(self, seq_len: int, device: torch.device) -> Mask:
        """The mask for sequences of `seq_len` tokens, kept for the next pass of that length."""
        spec = self.spec
        self._check(seq_len)
        key = (seq_len, device)
        if key not in self._masks:
            whole = seq_len if spec.encoder else spec.max_seq_len
            with torch.inference_mode(False):  # no inference tensors: a model that is scored first may be trained later
                made = self._masks.get((whole, device)) or self._drawn(whole, device)
                count = -(-seq_len // spec.block)
                self._masks = {(whole, device): made, key: made if whole == seq_len else _first(made, count)}
        return self._masks[key]

    def _drawn(self, seq_len: int, device: torch.device) -> Mask:
        spec = self.spec
        return bigbird(
            seq_len,
            block=spec.block,
            num_window=spec.num_window,
            num_global=spec.num_global,
            num_random=spec.num_random,
            seed=spec.seed + 1_000_003 * self.layer,
            num_heads=spec.num_heads,
            causal=not spec.encoder,
            device=device,
        )

    def _check(self, seq_len: int) -> None:
        if not self.spec.encoder and seq_len > self.spec.max_seq_len:
            raise SpecError(
                f"bigbird draws its blocks for {self.spec.max_seq_len} tokens, the input has {seq_len}",
                fix=f"cut it to {self.spec.max_seq_len}, or set a longer max_seq_len",
            )

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attention of new tokens after those in `carry`: [B, n, H, Dh]."""
        spec = self.spec
        if spec.encoder:
            context.must_be_whole("bigbird with encoder: true")
        known = context.carry.get(self.layer)
        if known is not None:
            k, v = torch.cat((known.k, k), 1), torch.cat((known.v, v), 1)
        context.carry[self.layer] = KeyValues(k, v)
        self._check(k.shape[1])
        table = self.mask(spec.max_seq_len, q.device).table
        place = torch.arange(k.shape[1], device=q.device)
        query = place[-q.shape[1] :]
        rows = table[:, :, query // spec.block][..., place // spec.block]
        return sdpa(q, k, v, rows & (place <= query[:, None]), self.scale)


def _first(mask: Mask, count: int) -> Mask:
    """The mask of the first `count` blocks."""
    return replace(mask, table=mask.table[..., :count, :count].contiguous())
