"""Attention under sparse masks against FlexAttention compiled, and against hone's own dense rate on the tiles that are kept.

A figure is FLOP/s on kept tiles: tiles of 128 queries by 128 keys with a pair in them that the mask keeps, 4 H D FLOPs for each
of their 128 x 128 pairs forward and 2.5 times that backward, whatever tiles a kernel has itself. `of_limit` divides it by the
dense rate (full mask, same shape, same run). Lists and FlexAttention's BlockMask, of the same rule, are made beforehand; rows
of their own say how long that takes. 16k tokens, 16 heads of 128.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernels.attention import backward_seconds, randoms
from benchmarks.kernels.timing import Ceilings, interleaved, median_seconds, row
from hone.ops import attend
from hone.ops.attention import masks
from hone.ops.attention.api import tile_sizes
from hone.ops.attention.masks import FULL, Mask, as_flex

SEQ_LEN, NUM_HEADS, HEAD_DIM = 16384, 16, 128
NUM_DOCUMENTS = SEQ_LEN // 1024


def rows(limits: Ceilings) -> list[dict[str, Any]]:
    """Window, documents, BigBird; forward and backward."""
    ours = [randoms(1, SEQ_LEN, NUM_HEADS, HEAD_DIM) for _ in range(4)]
    theirs = [part.transpose(1, 2).contiguous() for part in ours]
    dense_flops = 4 * NUM_HEADS * HEAD_DIM * SEQ_LEN**2
    dense = (
        dense_flops / median_seconds(lambda: attend(*ours[:3], FULL)),
        2.5 * dense_flops / backward_seconds([(lambda q, k, v: attend(q, k, v, FULL), ours)], 2)[0],
    )
    flex = torch.compile(flex_attention, dynamic=False)
    made = []
    for name, mask in every_mask().items():
        block_mask = flex_blocks(mask)

        def peer(q: Tensor, k: Tensor, v: Tensor, block_mask: Any = block_mask) -> Tensor:
            return flex(q, k, v, block_mask=block_mask)

        def mine(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
            return attend(q, k, v, mask)

        mine(*ours[:3])  # lists made here are read by the captured calls
        seconds = (
            interleaved([lambda mine=mine: mine(*ours[:3]), lambda peer=peer: peer(*theirs[:3])]),
            backward_seconds([(mine, ours), (peer, theirs)], 8),
        )
        for at, pass_name in enumerate(("fwd", "bwd")):
            made.append(
                row(
                    f"attend {pass_name} {name}",
                    seconds[at][0],
                    amount=kept_flops(mask, ours[0].device) * (2.5 if at else 1.0),
                    unit="TFLOP/s",
                    ceiling=dense[at],
                    peer="FlexAttention compiled",
                    peer_seconds=seconds[at][1],
                    target=1.7,
                    of_target=0.85,
                )
                | {"note": "FLOPs of the 128 x 128 tiles that keep a pair; limit: dense rate of this run"}
            )
        made.append(list_row(name, mask, ours[0]))
    return made


def every_mask() -> dict[str, Mask]:
    """The masks of the table, by their figure's name."""
    cuts = torch.randint(1, SEQ_LEN, (NUM_DOCUMENTS - 1,), generator=torch.Generator().manual_seed(0)).sort().values
    starts = torch.cat((torch.tensor([0]), cuts, torch.tensor([SEQ_LEN]))).cuda()
    return {
        "window 1024 of 16k": masks.window(1024),
        "documents of mean 1k in 16k": masks.documents_at(starts, SEQ_LEN),
        "BigBird of 16k in blocks of 128": masks.bigbird(SEQ_LEN, block=128, device="cuda"),
    }


def flex_blocks(mask: Mask) -> Any:
    """FlexAttention's BlockMask of the same rule."""
    return create_block_mask(as_flex(mask, SEQ_LEN, SEQ_LEN), None, None, SEQ_LEN, SEQ_LEN, device="cuda")


def kept_flops(mask: Mask, device: torch.device) -> float:
    """FLOPs of a forward pass on the 128 x 128 tiles in which the mask keeps a pair."""
    tiles = mask.tiles(SEQ_LEN, SEQ_LEN, 128, 128, device)
    return 4 * NUM_HEADS * HEAD_DIM * 128 * 128 * int(tiles.kv_count.sum())


def list_row(name: str, mask: Mask, q: Tensor) -> dict[str, Any]:
    """Milliseconds of making the lists of both passes (once per mask for all layers), and of create_block_mask.

    By the clock on the wall: both are many small kernels, which the CPU takes longer to start than the GPU to run.
    """
    blocks = tile_sizes(q.device, q.dtype, HEAD_DIM, HEAD_DIM, mask.block)

    def lists() -> None:
        fresh = replace(mask)  # with nothing kept
        fresh.tiles(SEQ_LEN, SEQ_LEN, blocks[0], blocks[1], q.device)
        fresh.tiles(SEQ_LEN, SEQ_LEN, blocks[2], blocks[3], q.device, transposed=True)

    seconds = [wall_seconds(lists), wall_seconds(lambda: flex_blocks(mask))]
    made = {"figure": f"tile lists of {name}", "value": 1e3 * seconds[0], "unit": "ms", "seconds": seconds[0]}
    return made | {
        "peer": "create_block_mask", "peer_value": 1e3 * seconds[1], "ratio": seconds[1] / seconds[0], "target": 1.0,
    }  # fmt: skip


def wall_seconds(run: Callable[[], Any]) -> float:
    """Median seconds from the call of `run` until the GPU is done with it."""
    taken = []
    for _ in range(13):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[3:])
