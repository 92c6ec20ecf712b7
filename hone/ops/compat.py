"""Differences between Triton 3.6 and later: the names that moved, each under one name here. Needs Triton."""

from __future__ import annotations

import os
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core as tl_core

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton kernels run in its interpreter: on CPU tensors, in float32 and float16 only (bfloat16 is wrong there)."""

aggregate = getattr(gluon, "aggregate", None) or tl_core._aggregate
"""A class decorator for a group of values that kernels pass as one argument: the annotated fields."""

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""tma_load(descriptor, coordinates, barrier, shared): a box from global to shared memory. Renamed in 3.8."""

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""tma_store(descriptor, coordinates, shared): a box from shared to global memory; `tma.store_wait` waits."""

warpgroup_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""A barrier among the threads of one warp-specialized partition. `gl.barrier` in 3.8."""


def _tma_reduce_add(descriptor: Any, coordinates: Any, shared: Any, _semantic: Any = None) -> None:
    # 3.6 has the operation but no wrapper.
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, shared.handle)


tma_reduce_add = getattr(tma, "async_atomic_add", None) or builtin(_tma_reduce_add)
"""tma_reduce_add(descriptor, coordinates, shared): adds a box in shared memory to global memory, atomically an element."""


@gluon.jit
def named_barrier_sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Waits until THREADS threads have arrived at hardware barrier BARRIER (1 ... 15)."""
    # The unused result prevents removal of the statement; Gluon has no call for named barriers.
    gl.inline_asm_elementwise(
        "bar.sync %d" % BARRIER + ", %d; mov.u32 $0, 0;" % THREADS,  # noqa: UP031
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def named_barrier_arrive(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Arrives with this partition's threads at hardware barrier BARRIER (1 ... 15) without waiting."""
    gl.inline_asm_elementwise(
        "bar.arrive %d" % BARRIER + ", %d; mov.u32 $0, 0;" % THREADS,  # noqa: UP031
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
