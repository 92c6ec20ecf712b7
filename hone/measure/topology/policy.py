"""Which NUMA node new pages come from: Linux's memory policies by system call, tried in a child process first.

Containers often forbid these calls (seccomp without CAP_SYS_NICE), and some end the process that tries: so a child tries, once, and this
process does only what worked there. Without any of them a page still comes from the node of the processor that touches it first, which
is what a bound process wants.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Literal

Policy = Literal["bind", "preferred", "first touch"]
"""Only this node; this node as long as it has memory; the node of the processor that touches a page first."""

_CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "move_pages": 279},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "move_pages": 239},
}
"""Numbers of the system calls by processor (linux/arch/x86/entry/syscalls, include/uapi/asm-generic/unistd.h)."""
_MODES = {"first touch": 0, "preferred": 1, "bind": 2}
"""MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND (include/uapi/linux/mempolicy.h)."""
_MOVE = 1 << 1
"""MPOL_MF_MOVE: pages that are there move, too."""
_MOST_NODES = 1024

_TRIAL = """
import ctypes, mmap, sys
call, mode, node = map(int, sys.argv[1:])
mask = (ctypes.c_ulong * 16)()
mask[node // 64] = 1 << node % 64
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(call, mode, ctypes.byref(mask), ctypes.c_ulong(1025)):
    sys.exit(ctypes.get_errno() or 255)
mmap.mmap(-1, 1 << 20)[:] = bytes(1 << 20)
"""


def _number(call: str) -> int | None:
    """The number of a system call; None where this system has none."""
    return _CALLS.get(platform.machine(), {}).get(call) if sys.platform == "linux" else None


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    return mask


def _syscall(number: int, *arguments: object) -> int:
    """0, or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.syscall(ctypes.c_long(number), *arguments) >= 0 else ctypes.get_errno() or errno.EPERM


@cache
def trial(policy: Policy, node: int) -> str:
    """Whether a process here may give itself `policy`: "" when a child could, else what happened to it."""
    number = _number("set_mempolicy")
    if number is None:
        return f"{platform.system()} on {platform.machine()} has no memory policies"
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(number), str(_MODES[policy]), str(node)]
    try:
        code = subprocess.run(command, capture_output=True, timeout=30, check=False).returncode
    except (OSError, subprocess.SubprocessError) as error:
        return f"no child could try set_mempolicy: {error}"
    if code < 0:
        return f"set_mempolicy ends the process here (signal {-code})"
    return "" if code == 0 else f"set_mempolicy: {os.strerror(code)}"


def prefer(node: int, *, strict: bool = False) -> tuple[Policy, str]:
    """Takes this thread's new pages from `node`: by the strictest policy that is allowed. Returns it, and why it is no stricter.

    `strict` starts with 'bind', under which a full node ends the process although others have memory. Threads and processes started
    later have the same policy.
    """
    why = ""
    wanted: tuple[Policy, ...] = ("bind", "preferred") if strict else ("preferred",)
    for policy in wanted:
        said = trial(policy, node)
        number = _number("set_mempolicy")
        if not said and number is not None:
            failed = _syscall(number, _MODES[policy], ctypes.byref(_mask(node)), ctypes.c_ulong(_MOST_NODES + 1))
            if not failed:
                return policy, why
            said = f"set_mempolicy: {os.strerror(failed)}"
        why = why or said
    return "first touch", why


def by_first_touch() -> None:
    """Gives this thread the default policy again: pages come from the node of the processor that touches them first."""
    number = _number("set_mempolicy")
    if number is not None and not trial("first touch", 0):
        _syscall(number, _MODES["first touch"], None, ctypes.c_ulong(0))


def bound_pages(ranges: Sequence[tuple[int, int]], node: int, *, strict: bool = True) -> str:
    """Places the pages of memory `ranges` (address, bytes) on `node`, those that are there already too.

    Returns "" or why it was not done. Only whole pages inside a range count: others hold other things, too.
    """
    number, policy = _number("mbind"), "bind" if strict else "preferred"
    if said := trial("bind" if strict else "preferred", node):  # who may not set a policy may not bind pages
        return said
    assert number is not None, "a system with set_mempolicy has mbind"
    page = os.sysconf("SC_PAGE_SIZE")
    for address, num_bytes in ranges:
        begin, end = -(-address // page) * page, (address + num_bytes) // page * page
        if end <= begin:
            continue
        failed = _syscall(
            number,
            ctypes.c_void_p(begin),
            ctypes.c_ulong(end - begin),
            ctypes.c_int(_MODES[policy]),
            ctypes.byref(_mask(node)),
            ctypes.c_ulong(_MOST_NODES + 1),
            ctypes.c_uint(_MOVE),
        )
        if failed:
            return f"mbind: {os.strerror(failed)}"
    return ""


def nodes_of_pages(address: int, num_bytes: int, most: int = 256) -> dict[int, int] | None:
    """How many of `most` evenly spaced pages of a range are on each node; None where the kernel does not tell (move_pages).

    Pages that nothing has touched yet are on none and are not counted.
    """
    number, page = _number("move_pages"), os.sysconf("SC_PAGE_SIZE")
    if number is None:
        return None
    count = max(1, num_bytes // page)
    step = max(1, count // most)
    places = [address // page * page + place * page for place in range(0, count, step)]
    pages = (ctypes.c_void_p * len(places))(*places)
    status = (ctypes.c_int * len(places))()
    if _syscall(number, 0, ctypes.c_ulong(len(places)), ctypes.byref(pages), None, ctypes.byref(status), 0):
        return None
    found: dict[int, int] = {}
    for node in status:
        if node >= 0:
            found[node] = found.get(node, 0) + 1
    return found
