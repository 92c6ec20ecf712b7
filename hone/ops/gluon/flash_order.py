"""In which order the attention forward goes through the tiles of a mask that has lists (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.masks import Tiles

_BLOCK = 64
LONG = tl.constexpr(3)
"""How many times the average a list must be to be begun before its turn."""


@triton.jit
def order_tiles(kv_count, kv_index, kv_partial, made, num_m, num_n, BLOCK: tl.constexpr):
    """For BLOCK tiles of one list [B', H']: (number, count, partial, first tile of keys), each where its turn puts it.

    Far longer tiles than the average come first, the longest before all, or the launch would end with a program alone at one.
    Then from the last to the first: neighbours share keys in L2, and under a causal mask the first are the shortest.
    made int32 [1 + B' H' nM, 4]; made[0, 0] becomes 0.
    """
    start = tl.program_id(1) * num_m
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(made, 0)
    sums = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_m, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        sums += tl.load(kv_count + start + other, mask=other < num_m, other=0)
    longest = LONG * tl.sum(sums, 0) // num_m
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = mine < num_m
    count = tl.load(kv_count + start + mine, mask=inside, other=0)
    length = tl.where(count > longest, count, 0)
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_m, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        theirs = tl.load(kv_count + start + other, mask=other < num_m, other=-1)
        theirs = tl.where((theirs > longest) | (theirs < 0), theirs, 0)
        sooner = (theirs[None, :] == length[:, None]) & (other[None, :] > mine[:, None])
        place += tl.sum(((theirs[None, :] > length[:, None]) | sooner).to(tl.int32), 1)
    record = made + 4 * (1 + start + place)
    tl.store(record, mine, mask=inside)
    tl.store(record + 1, count, mask=inside)
    tl.store(record + 2, tl.load(kv_partial + start + mine, mask=inside, other=0), mask=inside)
    first = tl.load(kv_index + (start + mine) * num_n, mask=inside & (count > 0), other=0)
    tl.store(record + 3, first, mask=inside)


def ordered(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """(a counter that is 0 [4], the tiles' records [B' H' nM, 4] in the order of their turns); int32."""
    batch, heads, num_m, num_n = tiles.kv_index.shape
    made = torch.empty((1 + batch * heads * num_m, 4), dtype=torch.int32, device=tiles.kv_index.device)
    grid = (triton.cdiv(num_m, _BLOCK), batch * heads)
    order_tiles[grid](tiles.kv_count, tiles.kv_index, tiles.kv_partial, made, num_m, num_n, BLOCK=_BLOCK, num_warps=4)
    return made[0], made[1:]
