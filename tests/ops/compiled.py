"""Compiles Triton and Gluon kernels for Hopper on a machine without a GPU, and says what came out: spills, shared bytes, instructions.

    record = compile_triton(kernel, {"x": "*bf16", "n": "i32"}, {"BLOCK": 128}, num_warps=4)
    record = compile_gluon(kernel, {"q": descriptor("bf16", [1, 64, 1, 128]), "out": "*bf16", "n": "i32"}, {"D": 128})
    assert record.clean and record.count("HGMMA") == 16

Types are written as Triton writes them: "*bf16", "*fp32", "*i32", "*fp8e4nv", "i32", "fp32"; pointers are taken as 16-byte
aligned. About 4 s a kernel.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._layouts import NVMMASharedLayout

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 << 10
"""The most shared memory a block may have on Hopper, in bytes."""

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: ptxas' report, the machine code, and what a test asks of them."""

    shared: int
    num_warps: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    report: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    ttgir: str = field(repr=False)

    @property
    def serialized(self) -> bool:
        """Whether ptxas gave up the overlap of wgmma with other work in some function ("... will be serialized")."""
        return "serialized" in self.report

    @property
    def clean(self) -> bool:
        """No spills, no serialized wgmma, and shared memory that a block can have."""
        return self.spill_bytes == 0 and not self.serialized and self.shared <= SHARED_LIMIT

    @cached_property
    def sass(self) -> str:
        """The machine code's listing."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return _run("cuobjdump", "-sass", file.name)

    @cached_property
    def instructions(self) -> list[str]:
        """Every instruction of the listing, in order, e.g. 'HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT'."""
        return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][^;]*?)\s*;", self.sass)

    def count(self, start: str) -> int:
        """How many instructions begin with `start`: "HGMMA", "UTMALDG", "MUFU.EX2", "BAR.SYNC", "HMMA", "LDL" ..."""
        return sum(text.startswith(start) for text in self.instructions)

    def waits(self) -> list[int]:
        """For each wait on wgmma in the listing, in order: how many groups it leaves in flight."""
        return [int(n, 16) for n in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb\d+, (0x[0-9a-f]+)", self.sass)]

    def line(self) -> str:
        """One line for a log."""
        names = (
            "HGMMA",
            "HMMA",
            "UTMALDG",
            "UTMASTG",
            "MUFU.EX2",
            "FMUL",
            "FFMA",
            "FADD",
            "FMNMX",
            "SHFL",
            "BAR",
            "LDL",
            "STL",
        )
        counts = " ".join(f"{name} {self.count(name)}" for name in names if self.count(name))
        flags = " SERIALIZED" if self.serialized else ""
        return (
            f"regs {self.registers} spills {self.spill_bytes} shared {self.shared} waits {self.waits()} {counts}{flags}"
        )


def descriptor(dtype: str, box: Sequence[int], layout: NVMMASharedLayout | None = None) -> str:
    """The type of a TMA descriptor argument: elements like "bf16", the box it moves, the layout in shared memory."""
    bits = {"fp32": 32, "i32": 32, "bf16": 16, "fp16": 16}.get(dtype, 8)
    layout = layout or NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=len(box))
    return f"tensordesc<{dtype}[{', '.join(map(str, box))}],{layout!r}>"


def compile_triton(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any
) -> Compiled:
    """`kernel` (a @triton.jit function) for sm_90a; see `compile_gluon`. Use triton's "tensordesc<bf16[64, 128]>" for descriptors."""
    return _compile(ASTSource, kernel, signature, constexprs, **options)


def compile_gluon(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any) -> Compiled:
    """`kernel` (a @gluon.jit function) for sm_90a.

    `signature` types every argument that is no constexpr; `divisible` among the options names integer arguments that are
    multiples of 16 (pointers always are). The other options are the launch's: num_warps (4), maxnreg, num_stages ...
    """
    return _compile(GluonASTSource, kernel, signature, constexprs, **options)


def _compile(
    source: Any,
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    divisible: Iterable[str] = (),
    **options: Any,
) -> Compiled:
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    missing = [name for name, kind in types.items() if kind == "constexpr" and name not in constexprs]
    unknown = (set(signature) | set(constexprs)) - set(types)
    if missing or unknown:
        raise ValueError(
            f"arguments without a type or value: {missing}; not arguments of the kernel: {sorted(unknown)}"
        )
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if str(kind).startswith("*") or name in set(divisible)
    }
    printed = io.StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(printed):
        triton.knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(
            source(kernel, types, constexprs=dict(constexprs), attrs=aligned),
            target=HOPPER,
            options={"num_warps": 4, **options},
        )
    return _examined(made, printed.getvalue())


def _examined(made: Any, report: str) -> Compiled:
    """The record of what `triton.compile` returned and ptxas printed: nothing where Triton's cache had the kernel."""
    if "registers" not in report:
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = (Path(folder) / name for name in ("k.ptx", "k.cubin"))
            ptx.write_text(made.asm["ptx"])
            report = _run("ptxas", "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(cubin))
    numbers = {
        what: sum(map(int, re.findall(rf"(\d+) bytes {what}", report)))
        for what in ("stack frame", "spill stores", "spill loads")
    }
    registers = max(map(int, re.findall(r"Used (\d+) registers", report)), default=0)
    return Compiled(
        shared=made.metadata.shared,
        num_warps=made.metadata.num_warps,
        registers=registers,
        spill_bytes=numbers["spill stores"] + numbers["spill loads"],
        stack_bytes=numbers["stack frame"],
        report=report,
        ptx=made.asm["ptx"],
        cubin=made.asm["cubin"],
        ttgir=made.asm["ttgir"],
    )


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_BIN / tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


STRIDES = {"stride", "token", "head", "slot", "page", "outer", "width", "half", "values", "expert", "row", "in", "out"}


def compile_simple(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    """`kernel` with pointers as `types` say and every other argument an i32, strides and widths in sixteens."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: types.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name] == "i32" and name.rsplit("_", 1)[-1] in STRIDES]
    return compile_triton(kernel, signature, constants, num_warps=warps, divisible=aligned)


def bf16(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*bf16")


def fp32(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*fp32")


NUMBERS = dict.fromkeys(("eps", "largest", "lift", "z_loss", "smoothing", "alpha", "temperature"), "fp32")
