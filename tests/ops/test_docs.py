"""docs/ops.md says which operations nothing in hone calls yet: checked against the call sites."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import torch

import hone.ops

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ops.md"
OPTIONS = {"attend_paged": "k_scale", "rms_norm": "quantize", "rope": "in_place", "attend": "softcap"}
"""Options that have kernels, or much of a kernel, of their own."""


def product() -> Iterator[ast.AST]:
    """Every node of hone's source outside of hone/ops, of the files that name operations."""
    for path in (ROOT / "hone").rglob("*.py"):
        if "ops" not in path.relative_to(ROOT / "hone").parts[:1]:
            source = path.read_text(encoding="utf8")
            if any(name in source for name in ("hone.ops", *OPTIONS)):
                yield from ast.walk(ast.parse(source))


def unwired() -> set[str]:
    """'name' of public functions that the product does not import, 'name(option=)' of options that it does not pass."""
    imported, passed = set(), set()
    for node in product():
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hone.ops"):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            passed |= {(name, keyword.arg) for keyword in node.keywords}
    found = {name for name in hone.ops.__all__ if name not in imported}
    return found | {f"{name}({option}=)" for name, option in OPTIONS.items() if (name, option) not in passed}


def test_what_is_not_yet_wired_is_what_nothing_calls() -> None:
    section = PAGE.read_text(encoding="utf8").split("## Not yet wired")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE))
    assert listed == unwired(), "docs/ops.md, 'Not yet wired': strike what has got a caller, add what has lost its last"


def test_every_folder_of_operations_is_on_the_page() -> None:
    folders = {path.parent.name for path in (ROOT / "hone" / "ops").glob("*/api.py")}
    table = PAGE.read_text(encoding="utf8").split("## A mask")[0]
    assert folders == {name.rstrip("/") for name in re.findall(r"\| `(\w+)/` \|", table)}
    for name in hone.ops.__all__:
        assert f"`{name}" in PAGE.read_text(encoding="utf8"), name


def test_every_block_of_code_runs() -> None:
    text = PAGE.read_text(encoding="utf8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    told = [block for block in blocks if block.startswith(">>>")]
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    for block in blocks:
        if block not in told:
            exec(compile(block, "docs/ops.md", "exec"), {"__name__": "docs_ops", "q": q, "k": k, "v": v})
    parsed = doctest.DocTestParser().get_doctest("".join(told), {}, "docs/ops.md", None, 0)
    runner = doctest.DocTestRunner()
    runner.run(parsed)
    assert parsed.examples and runner.failures == 0
