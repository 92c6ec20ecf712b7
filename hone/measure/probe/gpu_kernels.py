"""The kernels that a probe of a GPU times, in Triton: a chain of loads, repeated reads of a buffer, a chain of register operations."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["steps"])
def chase(at_ptr, steps):
    """One warp follows a chain of `steps` loads; each loaded word (int64) is the address of the next. Stores the last address.

    at_ptr: int64 [1], the address to begin at. Addresses are absolute, so that nothing but the load is between two loads. The load is
    one line of PTX: tl.load clears its result's register first, which is the address' own here (Triton 3.6), and reads address 0.
    """
    at = tl.load(at_ptr)
    for _ in range(steps):
        at = tl.inline_asm_elementwise("ld.global.b64 $0, [$1];", "=l,l", [at], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(at_ptr, at)


@triton.jit(do_not_specialize=["turns"])
def read(source_ptr, out_ptr, blocks, turns, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """All programs read `blocks` blocks of BLOCK int32 of source_ptr in each of `turns` turns, past the first cache (.cg), and add them.

    In each turn a program reads other blocks than in the turn before: no multiprocessor has a part to itself. out_ptr: int32 [programs].
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        for block in range((program + turn * SHIFT) % programs, blocks, programs):
            place = block.to(tl.int64) * BLOCK
            total += tl.load(source_ptr + place + lanes, cache_modifier=".cg")
    tl.store(out_ptr + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rounds"])
def register_chain(state_ptr, rounds, LANES: tl.constexpr):
    """`rounds` rounds of xorshift (Marsaglia 2003) on LANES states of 32 bits: six dependent operations each. state_ptr: int32 [LANES]."""
    lanes = tl.arange(0, LANES)
    state = tl.load(state_ptr + lanes)
    for _ in range(rounds):
        state ^= state << 13
        state ^= (state.to(tl.uint32, bitcast=True) >> 17).to(tl.int32, bitcast=True)
        state ^= state << 5
    tl.store(state_ptr + lanes, state)
