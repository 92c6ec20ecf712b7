"""Scan against dense causal attention of the same shape, and against a copy of the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.attention import backward_seconds
from benchmarks.kernels.timing import Ceilings, interleaved, median_seconds, row
from hone.ops import scan
from hone.ops.scan.api import scan_backward, scan_forward

PEER = "cuDNN causal attention"
SHAPE = (1, 16384, 16, 128)


def rows(limits: Ceilings) -> list[dict[str, Any]]:
    """Forward and backward at 16k tokens, 16 heads of 128; one decoding step of 64 sequences."""
    made = []
    for form, name in (("none", "linear"), ("token", "decay a token (Mamba-2)"), ("channel", "decay a channel (GLA)")):
        q, k, v, decay = _drawn(form)
        bytes_once = q.numel() * q.element_size()
        decay_bytes = 0 if form != "channel" else decay.numel() * decay.element_size()  # of the others it is a 128th
        dense = torch.no_grad()(lambda q=q, k=k, v=v: _causal(q, k, v))
        (dense_backward,) = backward_seconds([(_causal, [q, k, v, torch.randn_like(q)])], 2)
        forward, backward = _passes(q, k, v, decay, "triton" if form == "channel" else "gluon")
        mine, peer = interleaved([forward, dense])
        made.append(
            row(
                f"scan forward, {name}, s 16384 h 16 d 128",
                mine,
                amount=4 * bytes_once + decay_bytes,
                unit="TB/s",
                ceiling=limits.copy,
                peer=PEER,
                peer_seconds=peer,
                target=4.0,
                of_target=0.45,
            )
        )
        mine = median_seconds(backward)
        made.append(
            row(
                f"scan backward, {name}, s 16384 h 16 d 128",
                mine,
                amount=7 * bytes_once + 2 * decay_bytes,
                unit="TB/s",
                ceiling=limits.copy,
                peer=PEER,
                peer_seconds=dense_backward,
                of_target=0.35,
            )
        )
    made.append(_step(limits))
    return made


def _drawn(form: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    shape = {"none": None, "token": SHAPE[:3], "channel": SHAPE}[form]
    return q, k * SHAPE[-1] ** -0.5, v, None if shape is None else -0.3 * torch.rand(shape, device="cuda")


def _passes(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, backend: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    out, final, starts = scan_forward(q, k, v, decay, None, None, 1.0, backend)
    d_out, d_final = torch.randn_like(out), torch.randn_like(final)
    return (
        lambda: scan_forward(q, k, v, decay, None, None, 1.0, backend),
        lambda: scan_backward(
            q, k, v, decay, None, None, 1.0, backend, starts, final, d_out, d_final, decay is not None
        ),
    )


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def _step(limits: Ceilings) -> dict[str, Any]:
    """One token for each of 64 sequences: bound by reading and writing the states."""
    q, k, v = (torch.randn(64, 1, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    decay = -torch.rand(64, 1, 32, device="cuda")
    state = torch.randn(64, 32, 128, 128, device="cuda")
    seconds = median_seconds(lambda: scan(q, k, v, decay, state=state, return_state=True))
    return row(
        "scan, one token of 64 sequences, h 32 d 128",
        seconds,
        amount=2 * state.numel() * 4,
        unit="TB/s",
        ceiling=limits.copy,
        of_target=0.45,
    )
