"""Random rows in pages, the softmax written out over each row in float64, and pages whose unused slots are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.ops import quantize_kv

TREE = torch.tensor([0b00001, 0b00011, 0b00101, 0b01011, 0b10101])
"""A root with two children, each with one: what each attends to among the five, itself included."""


class Case:
    """Rows of `seq_lens` tokens, the last `query_lens` of which ask; pages in shuffled order, unused slots full of NaN.

    `given` are the arguments of `attend_paged` before its options, `options` its keyword arguments. Pages are in
    `page_dtype`, with scales of every token and head when that has 8 bits.
    """

    def __init__(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int] | None = None,
        *,
        kv_heads: int = 2,
        groups: int = 2,
        head_dim: int = 16,
        value_dim: int | None = None,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        page_dtype: torch.dtype | None = None,
        device: str = "cpu",
        seed: int = 0,
        sinks: bool = False,
        **options: Any,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.counts = [1] * len(seq_lens) if query_lens is None else list(query_lens)
        self.lens, self.page_size = list(seq_lens), page_size
        widest = max(1, max(-(-length // page_size) for length in seq_lens))
        num_pages = len(seq_lens) * widest + 1
        order = torch.randperm(num_pages - 1, generator=generator, device=device) + 1
        self.table = order.view(len(seq_lens), widest).int()
        heads = kv_heads * groups

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

        q = normal(sum(self.counts), heads, head_dim).to(dtype)
        pages = [normal(num_pages, kv_heads, page_size, width) for width in (head_dim, value_dim or head_dim)]
        scales: list[Tensor] = []
        if page_dtype in (torch.float8_e4m3fn, torch.int8):
            pages, scales = map(list, zip(*(quantize_kv(x, page_dtype) for x in pages)))
        else:
            pages = [x.to(page_dtype or dtype) for x in pages]
        self.pages, self.scales = pages, scales
        self.options = {"scale": head_dim**-0.5, **options}
        if sinks:
            self.options["sinks"] = normal(heads)
        if scales:
            self.options |= {"k_scale": scales[0], "v_scale": scales[1]}
        self.q = q

    def poisoned(self) -> list[Tensor]:
        """`attend_paged`'s tensors, with NaN (or the largest number) in every slot of the pages that no row uses."""
        used = torch.zeros(self.pages[0].shape[0], self.page_size, dtype=torch.bool, device=self.q.device)
        for row, length in enumerate(self.lens):
            slots = torch.arange(length, device=self.q.device)
            used[self.table[row, slots // self.page_size].long(), slots % self.page_size] = True
        pages = []
        for page in self.pages:
            page = page.clone()
            spots = ~used[:, None, :, None].expand(page.shape)
            if page.element_size() == 1:
                page.view(torch.uint8)[spots] = 0x7F  # NaN in float8, 127 in int8
            else:
                page[spots] = float("nan")
            pages.append(page)
        lens = torch.tensor(self.lens, dtype=torch.int32, device=self.q.device)
        counts = torch.tensor(self.counts, dtype=torch.int32, device=self.q.device)
        every = None if all(count == 1 for count in self.counts) else counts
        return [self.q, *pages, self.table, lens, every]

    def expected(self) -> Tensor:
        """The softmax written out, float64 [T, H, Dv]."""
        window, sink_tokens = self.options.get("window"), self.options.get("sink_tokens", 0)
        sinks, out, begin = self.options.get("sinks"), [], 0
        for row, (length, count) in enumerate(zip(self.lens, self.counts)):
            k, v = (self._row(row, length, which) for which in (0, 1))
            groups = self.q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            q = self.q[begin : begin + count].double()
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.options["scale"]
            key = torch.arange(length, device=q.device)[None]
            place = torch.arange(length - count, length, device=q.device)[:, None]
            seen = key <= place
            if (tree := self.options.get("tree")) is not None and count:
                own = torch.arange(count, device=q.device)
                seen[:, length - count :] = (tree[:, None] >> own & 1).bool()
            if window is not None:
                seen &= (key > place - window) | (key < sink_tokens)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                extra = sinks.double()[:, None, None].expand(-1, count, 1)
                weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights.nan_to_num(0.0), v))
            begin += count
        return torch.cat(out)

    def _row(self, row: int, length: int, which: int) -> Tensor:
        """Keys (0) or values (1) of a row, float64 [length, KV, D]."""
        slots = torch.arange(length, device=self.q.device)
        pages, offsets = self.table[row, slots // self.page_size].long(), slots % self.page_size
        found = self.pages[which][pages, :, offsets].double()
        return found * self.scales[which][pages, :, offsets].double()[..., None] if self.scales else found


def distance(mine: Tensor, oracle: Tensor) -> float:
    """Relative error in the 2-norm; NaN where any number is NaN."""
    return ((mine.double() - oracle).norm() / oracle.norm()).item()
