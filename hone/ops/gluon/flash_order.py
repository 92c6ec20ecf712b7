"""In which order the attention forward goes through the tiles of a mask that has lists: the longest first (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.masks import Tiles

_BLOCK = 64


@triton.jit
def order_tiles(kv_count, kv_index, kv_partial, made, num_m, num_n, BLOCK: tl.constexpr):
    """For BLOCK tiles of one list [B', H']: (number, count, partial, first tile of keys), each where its length puts it.

    A tile's place is how many are longer, or as long and before it. made int32 [1 + B' H' nM, 4]; made[0, 0] becomes 0.
    """
    start = tl.program_id(1) * num_m
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(made, 0)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = mine < num_m
    count = tl.load(kv_count + start + mine, mask=inside, other=-1)
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_m, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        length = tl.load(kv_count + start + other, mask=other < num_m, other=-1)
        earlier = (other[None, :] < mine[:, None]) & (length[None, :] == count[:, None])
        place += tl.sum(((length[None, :] > count[:, None]) | earlier).to(tl.int32), 1)
    record = made + 4 * (1 + start + place)
    tl.store(record, mine, mask=inside)
    tl.store(record + 1, count, mask=inside)
    tl.store(record + 2, tl.load(kv_partial + start + mine, mask=inside, other=0), mask=inside)
    first = tl.load(kv_index + (start + mine) * num_n, mask=inside & (count > 0), other=0)
    tl.store(record + 3, first, mask=inside)


def ordered(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """(a counter that is 0 [1], the tiles' records [B', H', nM, 4], longest first); int32."""
    batch, heads, num_m, num_n = tiles.kv_index.shape
    made = torch.empty((1 + batch * heads * num_m, 4), dtype=torch.int32, device=tiles.kv_index.device)
    grid = (triton.cdiv(num_m, _BLOCK), batch * heads)
    order_tiles[grid](tiles.kv_count, tiles.kv_index, tiles.kv_partial, made, num_m, num_n, BLOCK=_BLOCK, num_warps=4)
    return made[0], made[1:]
