"""Training's attention over latents (MLA), whose queries and keys are wider than its values, forward and backward, against cuDNN.

16 heads of 128 + 64 for scores and 128 for values, causal, 16k tokens: the sizes of DeepSeek-V2-Lite, and 128 heads, those of V3, with fewer
tokens. FLOPs are those of both products as they are: 2 B H S^2 (192 + 128) forward, halved for the mask; backward 2 B H S^2 (3 x 192 + 2 x 128).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.attention import PEER, backward_seconds, randoms
from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import attend

SCORES, VALUES = 192, 128
"""Width of a head's queries and keys, and of its values."""


def rows(limits: Ceilings) -> list[dict[str, Any]]:
    """Sequences of 4k and 8k with 16 heads, of 4k with 128."""
    made = []
    for heads, batch, seq_len in ((16, 4, 4096), (16, 2, 8192), (128, 1, 4096)):
        made += measured(heads, batch, seq_len, limits)
    return made


def measured(heads: int, batch: int, seq_len: int, limits: Ceilings) -> list[dict[str, Any]]:
    """The forward and the backward row of one shape."""
    widths = (SCORES, SCORES, VALUES, VALUES)  # of queries, keys, values and the gradient of what comes out
    ours = [randoms(batch, seq_len, heads, width) for width in widths]
    theirs = [part.transpose(1, 2).contiguous() for part in ours]

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    pairs = batch * heads * seq_len**2  # two FLOPs each, half of them masked
    flops = {"fwd": pairs * (SCORES + VALUES), "bwd": pairs * (3 * SCORES + 2 * VALUES)}
    taken = {
        "fwd": interleaved([lambda: attend(*ours[:3]), lambda: cudnn(*theirs[:3])]),
        "bwd": backward_seconds([(attend, ours), (cudnn, theirs)], 4),
    }
    label = f"causal s{seq_len}, {heads} heads of {SCORES} with values of {VALUES}"
    return [
        row(
            f"attend {name} latent {label}", seconds[0], amount=flops[name], unit="TFLOP/s", ceiling=limits.gemm,
            peer=PEER, peer_seconds=seconds[1], target=0.9,
        )
        for name, seconds in taken.items()
    ]  # fmt: skip
