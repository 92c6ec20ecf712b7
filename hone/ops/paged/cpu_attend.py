"""Attention of one new token a sequence over pages on a CPU, as a program of its own: the twin of `attend_paged`."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.cpu.program import Program, scratch_bytes


def attend_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, window: int | None
) -> Tensor:
    """As `attend_paged` for q [R, H, Dh], one token a sequence, and pages of q's dtype: [R, H, Dh]."""
    rows, heads, dim = q.shape
    program = Program(q.dtype, rows, scratch_bytes(dim))
    source, operand, attended = (
        q.reshape(rows, -1).contiguous(),
        program.operand(heads * dim),
        program.operand(heads * dim),
    )
    program.load_operand(source, operand)
    program.attend(operand, (heads, k_pages.shape[1], dim), (k_pages, v_pages), scale, window, attended)
    none = torch.zeros(1, dtype=torch.int64)
    program.run(rows, (none, none, none, seq_lens.int().contiguous(), page_table.int().contiguous()))
    return attended.to(q.dtype).view(rows, heads, dim)
