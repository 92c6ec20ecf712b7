"""What scripts, examples and tests import of this repository exists: a function that moves takes all its readers along."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("hone", "benchmarks", "examples", "tests")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def names_of(tree: ast.Module) -> set[str]:
    """Everything that a file calls by a name of its own, at any depth: more than it offers, and never less."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def missing(module: str, wanted: str, offered: dict[str, set[str]]) -> bool:
    """Whether `module` has neither a name nor a part `wanted`."""
    whole = f"{module}.{wanted}"
    return (
        whole not in FILES and wanted not in offered.get(module, ()) and not (ROOT / whole.replace(".", "/")).is_dir()
    )


def test_every_name_that_is_imported_exists():
    trees = {module: ast.parse(path.read_text(encoding="utf8")) for module, path in FILES.items()}
    offered = {module: names_of(tree) for module, tree in trees.items()}
    broken = [
        f"{FILES[module].relative_to(ROOT)}: from {node.module} import {alias.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOLDERS
        for alias in node.names
        if missing(node.module or "", alias.name, offered)
    ]
    assert not broken, "\n".join(broken)
