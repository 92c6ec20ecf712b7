"""The kernel of `OneShot`, in Triton: write, signal, wait, add."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 16
"""Elements that are moved together: messages are multiples of it."""
_UNITS, _WARPS = 128, 8


@triton.jit
def _now():
    """Nanoseconds of the GPU's global clock."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def one_shot_kernel(
    x,  # [units, UNIT]
    out,  # [units, UNIT]
    addresses,  # int64 [2, SIZE]: every rank's buffer of two halves, and its flags int32 [SIZE, NUM_BLOCKS]
    calls,  # int32 [NUM_BLOCKS]: calls that each block has ended; they wrap around
    units,
    half,  # units of a half of the buffer
    rank,
    patience,  # nanoseconds
    SIZE: tl.constexpr,
    UNITS: tl.constexpr,  # units that a block moves at once
    UNIT: tl.constexpr,
):
    """out = the sum over ranks of x. Each block exchanges flags with the blocks of its number on the other ranks."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + block) + 1
    begin = (call & 1) * half
    kind = tl.pointer_type(x.dtype.element_ty)
    within = tl.arange(0, UNIT)[None, :]
    own = tl.multiple_of(tl.load(addresses + rank).to(kind), 16)
    for start in range(block * UNITS, units, blocks * UNITS):
        unit = start + tl.arange(0, UNITS)[:, None]
        tl.store(own + (begin + unit) * UNIT + within, tl.load(x + unit * UNIT + within, unit < units), unit < units)
    tl.debug_barrier()  # the whole block has written before one of its threads says so

    peers = tl.arange(0, SIZE)
    flags = tl.load(addresses + SIZE + peers).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + rank * blocks + block, call, sem="release", scope="sys")
    mine = tl.load(addresses + SIZE + rank).to(tl.pointer_type(tl.int32)) + peers * blocks + block
    until = _now() + patience
    behind = tl.min(tl.atomic_add(mine, 0, sem="acquire", scope="sys") - call, 0)
    while behind < 0:  # a difference, because counts wrap around
        behind = tl.min(tl.atomic_add(mine, 0, sem="acquire", scope="sys") - call, 0)
        if _now() > until:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()

    for start in range(block * UNITS, units, blocks * UNITS):
        unit = start + tl.arange(0, UNITS)[:, None]
        total = tl.zeros((UNITS, UNIT), tl.float32)
        for peer in tl.static_range(SIZE):
            theirs = tl.multiple_of(tl.load(addresses + peer).to(kind), 16)
            at = theirs + (begin + unit) * UNIT + within
            total += tl.load(at, unit < units, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + unit * UNIT + within, total.to(out.dtype.element_ty), unit < units)
    tl.store(calls + block, call)


def all_reduce(x: Tensor, addresses: Tensor, calls: Tensor, rank: int, half_bytes: int, patience_s: float) -> Tensor:
    """The sum over the ranks of contiguous x of at most `half_bytes`; see `OneShot`."""
    out, half = torch.empty_like(x), half_bytes // x.element_size()
    one_shot_kernel[(len(calls),)](
        x, out, addresses, calls, x.numel() // UNIT, half // UNIT, rank, int(patience_s * 1e9),
        SIZE=addresses.shape[1], UNITS=_UNITS, UNIT=UNIT, num_warps=_WARPS,
    )  # fmt: skip
    return out
