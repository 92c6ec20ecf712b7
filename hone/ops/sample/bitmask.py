"""Masks logits by bits: what grammars, lists of allowed tokens and banned words leave of a vocabulary.

Legend: E entries (one per token to draw), V vocabulary, M masks, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.sample import reference

BLOCK = 4096
"""Tokens of a program."""


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, *, backend: str | None = None) -> None:
    """Sets logits [E, V] in place to -inf where entry e's mask, row rows[e] of `bitmask`, has no bit for the token.

    `bitmask` int32 [M, W] has token t in bit t % 32 of word t // 32, the form of vLLM, xgrammar and llguidance. `rows`
    int64 [E], -1: the entry has no mask and is not touched. Logits are floating, their last axis contiguous. Raises
    SpecError for shapes, dtypes and devices that do not fit; rows are not checked, because the host would have to wait.
    """
    words = -(-logits.shape[-1] // 32)
    if logits.dim() != 2 or bitmask.dim() != 2 or rows.shape != logits.shape[:1] or bitmask.shape[-1] != words:
        raise SpecError(
            f"logits {tuple(logits.shape)}, bitmask {tuple(bitmask.shape)} and rows {tuple(rows.shape)} must be [E, V], "
            "[M, ceil(V / 32)] and [E]",
            fix="give masks of one bit for each token, and for each row of logits the number of its mask",
        )
    if not logits.is_floating_point() or bitmask.dtype != torch.int32 or rows.dtype != torch.int64:
        raise SpecError(
            f"logits are {logits.dtype}, bitmask {bitmask.dtype} and rows {rows.dtype}, not floating, int32 and int64",
            fix="give the model's logits, packed masks as int32 and their rows as int64",
        )
    if len({logits.device, bitmask.device, rows.device}) > 1:
        raise SpecError(
            f"logits are on {logits.device}, bitmask on {bitmask.device}, rows on {rows.device}",
            fix="copy the masks and their rows to the logits' device",
        )
    if backend_of("apply_token_bitmask", logits.device, backend, dtype=logits.dtype) == "triton":
        if logits.stride(-1) != 1:
            raise SpecError(
                f"logits have strides {tuple(logits.stride())}: a row is not contiguous",
                fix="give logits whose last axis is contiguous",
            )
        _bitmask_op(logits, bitmask.contiguous(), rows.contiguous())
    else:
        reference.apply_token_bitmask(logits, bitmask, rows)


@torch.library.custom_op("hone::apply_token_bitmask", mutates_args=("logits",))
def _bitmask_op(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    from hone.ops.sample.triton_bitmask import mask_rows

    num_rows, vocab_size = logits.shape
    if not num_rows or not vocab_size:
        return
    mask_rows[(num_rows, -(-vocab_size // BLOCK))](
        logits, bitmask, rows, logits.stride(0), vocab_size, bitmask.shape[1], BLOCK=BLOCK, num_warps=4
    )
