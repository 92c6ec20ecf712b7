"""Manners of the compilers of kernels: what keys their caches, and that they run without garbage collection."""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import platform
import sys
import tempfile
import threading
from functools import cache
from importlib.metadata import version
from pathlib import Path

LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables that limit the vector instructions that torch and its libraries use."""


def keep_kernels_apart() -> None:
    """Gives inductor a cache folder for this processor, its limits, this Python and this torch, in this process and its children.

    Inductor names its compiled graphs without the vector instructions they use, in a temporary folder that other machines
    may share or that outlives a virtual machine's move: a graph of AVX-512 ends the process where there is none. Sets the
    environment variable TORCHINDUCTOR_CACHE_DIR; a value that the user has set stays.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        user = os.getuid() if hasattr(os, "getuid") else ""
        folder = Path(tempfile.gettempdir()) / f"hone-inductor-{user}-{_key()}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


@cache
def compile_without_collections() -> None:
    """Numba compiles without garbage collection from now on: a fifth faster, a third where torch is imported.

    Its compiler makes millions of objects that live until it is done, and every collection visits all of them, and torch's.
    """
    from numba.core import event

    class Pause(event.Listener):
        """Counts who holds the compiler's lock, or waits for it; one thread does so several times, one inside another."""

        def __init__(self) -> None:
            self._counting = threading.Lock()
            self._held = 0
            self._was_on = False

        def on_start(self, event: object) -> None:
            with self._counting:
                if not self._held:
                    self._was_on = gc.isenabled()
                    gc.disable()
                self._held += 1

        def on_end(self, event: object) -> None:
            with self._counting:
                self._held -= 1
                if not self._held and self._was_on:
                    gc.enable()

    event.register("numba:compiler_lock", Pause())


@cache
def sources_digest(module: str) -> str:
    """A hash of the texts of an imported module and of all it imports from its own package, directly or not: part of the key of
    what numba keeps of it, since numba looks at the file of the outermost function alone.

    Imports in functions and for types do not count: kernels reach what their module's namespace holds, and whether another
    part of the process has imported more may not change the key.
    """
    package = module.partition(".")[0]
    texts: dict[str, bytes] = {}
    names = {module}
    while names:
        name = names.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name not in texts and name.partition(".")[0] == package:
            texts[name], imported = _text_and_imports(file)
            names |= imported
    return hashlib.sha256(b"".join(texts[name] for name in sorted(texts))).hexdigest()


@cache
def _text_and_imports(file: str) -> tuple[bytes, frozenset[str]]:
    """The text of a file and the names that it imports into its namespace, of which some are modules."""
    text, names = Path(file).read_bytes(), set()
    nodes: list[ast.AST] = [ast.parse(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
    return text, frozenset(names)


def _key() -> str:
    """Twelve digits of what a compiled kernel depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        lines = []
    found = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    found += [platform.processor(), platform.python_version(), version("torch")]
    found += [os.environ.get(name, "") for name in LIMITS]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]
