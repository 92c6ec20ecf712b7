"""Softmax of rows of logits that several devices share by columns: each device's numbers, and the gradient once all are known.

Legend: R rows (tokens), V columns of this device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.dispatch import backend_of
from hone.ops.loss.api import row_block


def row_sums(logits: Tensor, place: Tensor, *, backend: str | None = None) -> Tensor:
    """[2, R]: log(sum(exp(row))) of each row of `logits` [R, V], and its logit at `place` int64 [R], 0 where that is outside [0, V).

    float32, or float64 of float64 logits. The log-sum of all devices' columns is the logsumexp of theirs, and the logit the sum.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    sums = torch.empty(2, len(logits), dtype=wide, device=logits.device)
    if _on_kernel(logits, backend):
        from hone.ops.loss.triton_kernels import log_sum_rows

        block, warps, stages = row_block(logits.shape[1])
        log_sum_rows[(len(logits),)](
            logits, place, sums, logits.stride(0), len(logits), logits.shape[1],
            BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return sums
    sums[0] = logits.to(wide).logsumexp(-1)
    own = (place >= 0) & (place < logits.shape[1])
    sums[1] = logits.gather(1, torch.where(own, place, 0)[:, None])[:, 0].masked_fill(~own, 0)
    return sums


def row_gradients_(
    logits: Tensor, place: Tensor, log_sum: Tensor, valid: Tensor, *, backend: str | None = None
) -> Tensor:
    """`logits` [R, V], overwritten by the gradients of each row's cross entropy: softmax less one at `place` [R], 0 unless `valid` [R].

    `log_sum` [R] is of all devices' columns, as is the softmax; `place` outside [0, V) is another device's.
    """
    if _on_kernel(logits, backend):
        from hone.ops.loss.triton_kernels import gradient_rows

        block, warps, stages = row_block(logits.shape[1])
        gradient_rows[(len(logits),)](
            logits, place, log_sum, valid, logits.stride(0), logits.shape[1],
            BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
        return logits
    own = (place >= 0) & (place < logits.shape[1])
    logits.sub_(log_sum[:, None].to(logits.dtype)).exp_()
    logits.scatter_add_(1, torch.where(own, place, 0)[:, None], -own[:, None].to(logits.dtype))
    return logits.mul_(valid[:, None])


def _on_kernel(logits: Tensor, backend: str | None) -> bool:
    return backend_of("linear_cross_entropy", logits.device, backend, dtype=logits.dtype, softcap=False) == "triton"
