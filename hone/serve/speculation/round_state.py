"""The state of rounds on the device: what sequences have, where their tokens stand, and what a round's results move.

Legend: S sequences, Q nodes of a sequence's tree of guesses (`tree`), k its depth, P pages of the longest one. Node n is filed in the
n-th slot behind the tokens that are known, at the position of its depth; what is kept moves to the slots of its depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.ops import compat
from hone.serve.speculation.tree import Tree


@dataclass
class RoundState:
    """Tensors that stay where they are, int64 unless said; the host fills the first four."""

    tokens: Tensor
    """[S, Q] The last token that is known, and the guesses by node."""
    starts: Tensor
    """[S] Place of the first of them in its sequence."""
    limits: Tensor
    """[S] Guesses that count: the first so many nodes behind the root."""
    alive: Tensor
    """[S] 1, or 0 for a sequence that only pads: its tokens are filed in page 0."""
    table: Tensor
    """int32 [S, P]"""
    page_size: int
    tree: Tree
    nodes: Tensor
    """[4, Q] Of the tree: parents, depths, ranks, and as bits the nodes that each attends to."""
    placed: Tensor
    """[4, S, Q] Of the round's tokens: positions, the positions after them, pages, offsets."""
    ends: Tensor
    """int32 [2, S] Tokens in the cache after the round: with all nodes, and with a path's of the model's depth."""
    packed: Tensor
    """[S, 1 + k + Q] Guesses kept, the model's tokens behind the path (-1 where logits are not finite; after the last one it again), the
    guesses that follow."""
    path: Tensor
    """[S, 1 + k] The node kept of each place, among the S * Q; that of the first choice where none was."""
    rows: Tensor
    """[2, S] The last guess that was kept, or the known token: among the S * Q, and among the S * (1 + k) of `path`."""
    after: Tensor
    """[k, S] The places of the guesses that follow."""
    draft: Tensor
    """[3, k, S] Positions, pages and offsets of a drafter's passes, one of each sequence at a time: the last known token, then guesses."""
    draft_ends: Tensor
    """int32 [k, S]"""

    @classmethod
    def of(cls, tokens: Tensor, seqs: Tensor, table: Tensor, page_size: int, tree: Tree) -> RoundState:
        """`seqs` [3, S]: starts, limits and whether a sequence is alive."""
        count, width = tokens.shape
        k = tree.depth

        def made(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=tokens.device)

        return cls(
            tokens,
            *seqs,
            table=table,
            page_size=page_size,
            tree=tree,
            nodes=tree.on(tokens.device),
            placed=made(4, count, width),
            ends=made(2, count, dtype=torch.int32),
            packed=made(count, 1 + k + width),
            path=made(count, 1 + k),
            rows=made(2, count),
            after=made(k, count),
            draft=made(3, k, count),
            draft_ends=made(k, count, dtype=torch.int32),
        )

    def place(self) -> None:
        """Fills `placed` and `ends`."""
        count, width = self.tokens.shape
        if _runs_kernels(self.tokens):
            from hone.serve.speculation.triton_rounds import place_tokens

            place_tokens[(count,)](
                self.starts, self.alive, self.nodes, self.table, self.table.stride(0), self.placed, self.ends, count,
                WIDTH=width, DEPTH=self.tree.depth, BLOCK=_block(width), PAGE_SIZE=self.page_size, num_warps=1,
            )  # fmt: skip
            return
        slots = self.starts[:, None] + torch.arange(width, device=self.tokens.device)
        positions = self.starts[:, None] + self.nodes[1]
        pages = self.table.gather(1, slots // self.page_size) * self.alive[:, None]
        self.placed.copy_(torch.stack((positions, positions + 1, pages, slots % self.page_size)))
        for ends, most in zip(self.ends, (width, 1 + self.tree.depth)):
            ends.copy_((self.starts + most) * self.alive)

    def settle(self, chosen: Tensor, peaks: Tensor) -> None:
        """Keeps the guesses that are the model's own tokens `chosen` [S * Q], whose largest logits are `peaks`, and moves on behind them."""
        count, width = self.tokens.shape
        if _runs_kernels(self.tokens):
            from hone.serve.speculation.triton_rounds import settle_round

            settle_round[(count,)](
                self.tokens, chosen, peaks, self.nodes, self.starts, self.limits, self.alive, self.table, self.table.stride(0),
                self.packed, self.path, self.rows, self.after, self.draft, self.draft_ends, count,
                WIDTH=width, DEPTH=self.tree.depth, BLOCK=_block(width), PAGE_SIZE=self.page_size, num_warps=1,
            )  # fmt: skip
            return
        found = chosen.view(count, width)
        told = torch.where(peaks.view(count, width).isfinite(), found, -1)
        number, parents = torch.arange(width, device=chosen.device), self.nodes[0]
        node, kept = torch.zeros_like(self.starts)[:, None], torch.zeros_like(self.starts)[:, None]
        going = torch.ones_like(node, dtype=torch.bool)
        begins = torch.arange(0, count * width, width, device=chosen.device)[:, None]
        self.path[:, :1], self.packed[:, 1] = begins, told[:, 0]
        for place in range(1, self.tree.depth + 1):
            fits = (parents == node) & (self.tokens == found.gather(1, node)) & (number <= self.limits[:, None])
            going &= fits.any(1, keepdim=True)
            node = torch.where(going, fits.long().argmax(1, keepdim=True), node)
            kept += going
            self.path[:, place : place + 1] = begins + torch.where(going, node, place)
            self.packed[:, 1 + place : 2 + place] = told.gather(1, node)
        self.packed[:, :1] = kept
        self.rows[0] = (begins + node)[:, 0]
        self.rows[1] = torch.arange(count, device=chosen.device) * self.path.shape[1] + kept[:, 0]
        self.tokens[:, :1] = found.gather(1, node)
        self.starts += (kept[:, 0] + 1) * self.alive
        self.limits.fill_(width - 1)
        ahead = number[: self.tree.depth]
        positions = self.starts[:, None] + ahead
        pages = self.table.gather(1, positions // self.page_size) * self.alive[:, None]
        self.after.copy_((positions + 1).t())
        self.draft.copy_(torch.stack((positions, pages, positions % self.page_size)).transpose(1, 2))
        self.draft_ends.copy_(((positions + 1) * self.alive[:, None]).t())

    def keep(self, stores: Sequence[Tensor]) -> None:
        """Moves what a cache keeps of the path's nodes to the slots of their depths. `stores` [layers, pages, heads, page_size, width] each."""
        if self.tree.is_chain:
            return
        count, depth = self.path.shape
        for store in stores:
            if _runs_kernels(store):
                from hone.serve.speculation.triton_rounds import keep_path

                layers, pages, heads, size, width = store.shape
                keep_path[(layers, count)](
                    store, self.path, self.placed, store.stride(0), count * len(self.tree), WIDTH=len(self.tree), DEPTH=depth - 1,
                    HEADS=heads, BLOCK_H=_block(heads), DIM=width, BLOCK_D=_block(width), PAGE_SIZE=size, num_warps=4,
                )  # fmt: skip
                continue
            pages, offsets = self.placed[2], self.placed[3]
            found = store[:, pages.view(-1)[self.path], :, offsets.view(-1)[self.path]]
            store[:, pages[:, :depth], :, offsets[:, :depth]] = found

    def leave(self, guesses: Tensor) -> None:
        """Files the guesses [k, S, choices] that follow: in the next round's tokens, and where the host reads them."""
        count, width = self.tokens.shape
        if _runs_kernels(self.tokens):
            from hone.serve.speculation.triton_rounds import leave_guesses

            leave_guesses[(count,)](
                guesses.contiguous(), self.nodes, self.tokens, self.packed, count, guesses.shape[2],
                WIDTH=width, DEPTH=self.tree.depth, BLOCK=_block(width), num_warps=1,
            )  # fmt: skip
            return
        _, depths, ranks, _ = self.nodes[:, 1:]
        found = guesses[depths - 1, :, ranks].t()
        self.tokens[:, 1:] = found
        self.packed[:, 2 + self.tree.depth :] = found


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda or compat.INTERPRETED


def _block(width: int) -> int:
    return 1 << (width - 1).bit_length()
