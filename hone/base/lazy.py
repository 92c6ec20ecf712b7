"""Modules and objects that load on first use, so that reading a spec never imports torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy(name: str) -> Any:
    """A module object that imports module `name` at the first attribute access.

    Files of techniques hold a spec (read by the CLI, which must start fast) and its implementation (which needs
    torch). They write `torch = lazy("torch")` where another file would write `import torch`.
    """
    return _Lazy(name)


def resolve(row: str) -> Any:
    """The object that a table row 'package.module:Name' names."""
    module, _, attribute = row.partition(":")
    return getattr(importlib.import_module(module), attribute)
