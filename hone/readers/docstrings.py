"""Docstrings: the prose inside Python sources, one document a module, and the topics of the built-in help."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

_LEAST_ANSWER = 20
"""Characters of a docstring's first paragraph that says something."""
_HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose_of(source: str, name: str) -> list[str]:
    """Prose documents in Python `source`: its docstrings, each under the name that it documents, joined to one document.

    The module pydoc_data/topics.py is a table of the language reference: each topic becomes a document.
    Source that does not parse has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules are not reported
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if name.endswith("pydoc_data/topics.py"):
        return _topics(tree)
    parts = [text if not title else f"{title}\n\n{text}" for title, text in _docstrings(tree, "")]
    return ["\n\n\n".join(parts)] if parts else []


def questions_in(source: str, name: str) -> list[tuple[str, str]]:
    """(question, answer) of every public function and class in Python `source` with a docstring, whose first paragraph is the answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = []
    for title, text in _docstrings(tree, ""):
        answer = " ".join(text.strip().split("\n\n")[0].split())
        if title and len(answer) >= _LEAST_ANSWER and not any(part.startswith("_") for part in title.split(".")):
            found.append((f"What is {title} in the module {module}?", answer))
    return found


def _docstrings(node: ast.AST, title: str) -> Iterator[tuple[str, str]]:
    """(title, docstring) of `node` and everything public inside it, in source order."""
    if isinstance(node, _HOLDERS):
        text = ast.get_docstring(node)
        if text and text.strip():
            signature = (
                f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
            )
            yield title + signature, text
    for child in getattr(node, "body", []):
        if isinstance(child, _HOLDERS):
            yield from _docstrings(child, f"{title}.{child.name}" if title else child.name)


def _topics(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return [topics[key] for key in sorted(topics)]
    return []
