"""Programmatic dependent launch: a kernel starts while the previous one ends, and waits for its writes where it needs them.

A kernel launched with `launch_options` waits in every program before it writes anything, and allows the next kernel to start only
after that: then what is older than the previous kernel is always done. Before it waits it may read that alone, and prefetch
anything, which reads no value; what the previous kernel may have written it reads after it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hone.ops.compat import INTERPRETED
from hone.ops.dispatch import locate

_ON_GPU = tl.constexpr(not INTERPRETED)


@triton.jit
def previous_kernel_done(EARLY: tl.constexpr):
    """Waits until the previous kernel's writes are visible and its reads are done."""
    if EARLY and _ON_GPU:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def start_next_kernel(EARLY: tl.constexpr):
    """Allows the next kernel's blocks to start where this one's have ended. Called too early, they spread unevenly over SMs."""
    if EARLY and _ON_GPU:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch(pointers):
    """Prefetches the 128 bytes around each pointer into L2. No value is read, so this may precede any wait."""
    if _ON_GPU:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def early_launch(device: torch.device) -> bool:
    """Whether `device` can start a kernel before the previous one has ended (Hopper and later)."""
    return not INTERPRETED and not locate(device).capability < (9, 0)


def launch_options(early: bool) -> dict[str, Any]:
    """The options of a launch that may start early; its kernel gets EARLY=True."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
