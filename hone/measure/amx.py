"""Keeps oneDNN from tile instructions (AMX) on virtual machines that announce AMX and do not describe its tiles.

Such a machine sets the AMX bits of CPUID leaf 7 and leaves leaf 1DH, the table of tile palettes, empty. The oneDNN of
torch 2.11 to 2.13 reads the bits only: the first bfloat16 product on the CPU then ends the process with SIGILL
(github.com/uxlfoundation/oneDNN/issues/5689, mended there by pull request 5801).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

_CPUID_EAX = bytes.fromhex("53 89f8 89f1 0fa2 5b c3")
"""push rbx; mov eax, edi; mov ecx, esi; cpuid; pop rbx; ret: register EAX of a leaf, in the calling convention of Linux."""
_LIMIT, _SETTINGS = "AVX512_CORE_FP16", ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def avoid_undescribed_tiles() -> None:
    """Limits oneDNN to AVX-512 in this process and its children where AMX has no tile palette.

    Sets the environment variable ONEDNN_MAX_CPU_ISA, which oneDNN reads at its first product; a value that the user
    has set stays. hone.json records the limit with the machine (`Machine.cpu_isa_limit`).
    """
    if not any(name in os.environ for name in _SETTINGS) and _announces_tiles() and not _num_palettes():
        os.environ[_SETTINGS[0]] = _LIMIT


def cpu_isa_limit() -> str | None:
    """The instruction set that oneDNN is limited to, by this module or the user; None without a limit."""
    return next((os.environ[name] for name in _SETTINGS if name in os.environ), None)


def _announces_tiles() -> bool:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return any(line.startswith("flags") and " amx_tile" in line for line in lines)
    except OSError:
        return False


def _num_palettes() -> int:
    """EAX of CPUID leaf 1DH: the highest palette of tiles, 0 where the machine describes none."""
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a hardened kernel: what cannot be read is taken as announced
        return 1
    code.write(_CPUID_EAX)
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)(address)(0x1D, 0)
