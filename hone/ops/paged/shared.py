"""Decode attention of sequences that share their first pages.

Legend: R sequences, P pages of a sequence (padded), H query heads, KV key/value heads, Dh head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.paged.api import attend_paged


def attend_shared(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    shared: Tensor,
    *,
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """`attend_paged` of one new token a sequence, where the sequences shared[0] ... shared[1] - 1 begin with the same shared[2] pages.

    `shared` int32 [3] on q's device: (begin, end, whole pages that each of them is longer than or as long as). The kernel
    reads those pages once for all of them, the rest of each sequence by itself; (0, 0, 0) shares nothing. It is read on
    the device, so a captured graph serves any run of sequences. arXiv:2402.05099. The other arguments and the result are
    those of `attend_paged`. Raises SpecError for what does not fit. No gradient.
    """
    if shared.dtype != torch.int32 or shared.shape != (3,):
        raise SpecError(
            f"shared is {shared.dtype} {tuple(shared.shape)}",
            fix="give int32 [3]: first sequence, end, number of pages",
        )
    case = {"dtype": q.dtype, "page_dtype": k_pages.dtype}
    if q.dim() == 3 and k_pages.dim() == v_pages.dim() == 4:
        case |= {"head_dim": k_pages.shape[3], "v_dim": v_pages.shape[3]}
        fits = (
            k_pages.dtype == q.dtype and len(q) == len(seq_lens) == len(page_table) and q.shape[2] == k_pages.shape[3]
        )
        if fits and k_pages.shape[:3] == v_pages.shape[:3] and k_pages.shape[1] and q.shape[1] % k_pages.shape[1] == 0:
            if backend_of("attend_shared", q.device, backend, **case) == "triton":
                from hone.ops.paged.triton_shared import launch_shared

                return launch_shared(q, k_pages, v_pages, page_table, seq_lens, shared, scale)
            return attend_paged(q, k_pages, v_pages, page_table, seq_lens, scale=scale)
    raise SpecError(
        f"q {q.dtype} {tuple(q.shape)}, k_pages {k_pages.dtype} {tuple(k_pages.shape)}, v_pages {tuple(v_pages.shape)}, page_table "
        f"{tuple(page_table.shape)} and seq_lens {tuple(seq_lens.shape)} do not fit together",
        fix="q is [R, H, Dh], pages [num_pages, KV, page_size, Dh], pages of q's dtype, page_table [R, P], seq_lens [R]",
    )
