"""The call of a kernel that has a gradient: torch's op in a compiled graph, else without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function


def entry_of(op: Any, bare: Callable[..., Any], graded: type[Function], *given: Tensor | None) -> Any:
    """The callable that runs a kernel: torch's `op` in a compiled graph; else `graded` where a gradient is needed, else `bare`.

    The latter two avoid torch's dispatcher, which is most of a small call's time.
    """
    if torch.compiler.is_compiling():
        return op
    wants = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)
    return graded.apply if wants else bare
