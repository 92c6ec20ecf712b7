"""The state of rounds on the device: what sequences have, where their tokens stand, and what a round's results move.

Legend: S sequences, k guesses, Q = k + 1 tokens of a sequence in a round, P pages of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RoundState:
    """Tensors that stay where they are, int64 unless said; the host fills the first four."""

    tokens: Tensor
    """[S, Q] The last token that is known, and the guesses."""
    starts: Tensor
    """[S] Place of the first of them in its sequence."""
    limits: Tensor
    """[S] Guesses that count."""
    alive: Tensor
    """[S] 1, or 0 for a sequence that only pads: its tokens are filed in page 0."""
    table: Tensor
    """int32 [S, P]"""
    page_size: int
    placed: Tensor
    """[4, S, Q] Of the round's tokens: positions, the positions after them, pages, offsets."""
    ends: Tensor
    """int32 [S] Tokens in the cache after the round."""
    packed: Tensor
    """[S, 1 + Q + k] Guesses kept, the model's tokens (-1 where logits are not finite), the guesses that follow."""
    rows: Tensor
    """[S] The last guess that was kept, or the known token, among the S * Q."""
    after: Tensor
    """[k, S] The places of the guesses that follow."""
    draft: Tensor
    """[3, k, S] Positions, pages and offsets of a drafter's passes, one of each sequence at a time: the last known token, then guesses."""
    draft_ends: Tensor
    """int32 [k, S]"""

    @classmethod
    def of(cls, tokens: Tensor, seqs: Tensor, table: Tensor, page_size: int) -> RoundState:
        """`seqs` [3, S]: starts, limits and whether a sequence is alive."""
        count, width = tokens.shape
        k = width - 1

        def made(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=tokens.device)

        return cls(
            tokens,
            *seqs,
            table=table,
            page_size=page_size,
            placed=made(4, count, width),
            ends=made(count, dtype=torch.int32),
            packed=made(count, 1 + width + k),
            rows=made(count),
            after=made(k, count),
            draft=made(3, k, count),
            draft_ends=made(k, count, dtype=torch.int32),
        )

    def place(self) -> None:
        """Fills `placed` and `ends`."""
        count, width = self.tokens.shape
        if self.tokens.is_cuda:
            from hone.serve.speculation.triton_rounds import place_tokens

            place_tokens[(count,)](
                self.starts, self.alive, self.table, self.table.stride(0), self.placed, self.ends, count * width,
                WIDTH=width, BLOCK=_block(width), PAGE_SIZE=self.page_size, num_warps=1,
            )  # fmt: skip
            return
        positions = self.starts[:, None] + torch.arange(width, device=self.tokens.device)
        pages = self.table.gather(1, positions // self.page_size) * self.alive[:, None]
        self.placed.copy_(torch.stack((positions, positions + 1, pages, positions % self.page_size)))
        self.ends.copy_((self.starts + width) * self.alive)

    def settle(self, chosen: Tensor, peaks: Tensor) -> None:
        """Keeps the guesses that are the model's own tokens `chosen` [S * Q], whose largest logits are `peaks`, and moves on behind them."""
        count, width = self.tokens.shape
        if self.tokens.is_cuda:
            from hone.serve.speculation.triton_rounds import settle_round

            settle_round[(count,)](
                self.tokens, chosen, peaks, self.starts, self.limits, self.alive, self.table, self.table.stride(0),
                self.packed, self.rows, self.after, self.draft, self.draft_ends, count,
                WIDTH=width, BLOCK=_block(width), PAGE_SIZE=self.page_size, num_warps=1,
            )  # fmt: skip
            return
        found, ahead = chosen.view(count, width), torch.arange(width - 1, device=chosen.device)
        agree = (self.tokens[:, 1:] == found[:, :-1]) & (ahead < self.limits[:, None])
        kept = agree.long().cumprod(1).sum(1)
        self.packed[:, 0] = kept
        self.packed[:, 1 : 1 + width] = torch.where(peaks.view(count, width).isfinite(), found, -1)
        self.rows.copy_(torch.arange(count, device=chosen.device) * width + kept)
        self.tokens[:, :1] = found.gather(1, kept[:, None])
        self.starts += (kept + 1) * self.alive
        self.limits.fill_(width - 1)
        positions = self.starts[:, None] + ahead
        pages = self.table.gather(1, positions // self.page_size) * self.alive[:, None]
        self.after.copy_((positions + 1).t())
        self.draft.copy_(torch.stack((positions, pages, positions % self.page_size)).transpose(1, 2))
        self.draft_ends.copy_(((positions + 1) * self.alive[:, None]).t())

    def leave(self, guesses: Tensor) -> None:
        """Files the guesses [k, S] that follow: in the next round's tokens, and where the host reads them."""
        count, width = self.tokens.shape
        if self.tokens.is_cuda:
            from hone.serve.speculation.triton_rounds import leave_guesses

            leave_guesses[(count,)](
                guesses.contiguous(), self.tokens, self.packed, count, WIDTH=width, BLOCK=_block(width), num_warps=1
            )
            return
        self.tokens[:, 1:] = guesses.t()
        self.packed[:, 1 + width :] = guesses.t()


def _block(width: int) -> int:
    return 1 << (width - 1).bit_length()
