"""Numeric operations: one function an op, a plain torch reference for each; fast twins come beside them."""

from __future__ import annotations

import importlib
from typing import Any

# Name to home (no file is named as its function: a submodule would hide it). Everything loads on first use:
# a reference must not wait for a kernel's imports.
_HOMES: dict[str, str] = {
    "attend": "hone.ops.attention",
    "merge": "hone.ops.attention",
    "attend_paged": "hone.ops.paged",
    "attend_latent": "hone.ops.paged",
    "quantize_kv": "hone.ops.paged",
    "write_kv": "hone.ops.paged",
    "scan": "hone.ops.recurrence",
    "scan_delta": "hone.ops.recurrence",
    "linear": "hone.ops.gemm",
    "quantized_linear": "hone.ops.gemm",
    "fp8_linear": "hone.ops.gemm",
    "sparse_linear": "hone.ops.gemm",
    "choose": "hone.ops.dispatch",
    "grouped_linear": "hone.ops.grouped",
    "linear_cross_entropy": "hone.ops.loss",
    "permute": "hone.ops.grouped",
    "rms_norm": "hone.ops.fused",
    "rope": "hone.ops.fused",
    "rope_write": "hone.ops.fused",
    "sample": "hone.ops.sampling",
    "swiglu": "hone.ops.fused",
    "unpermute": "hone.ops.grouped",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hone.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
