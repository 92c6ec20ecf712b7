"""The `quantization_config` of AWQ checkpoints (AutoAWQ, GPTQModel, transformers) in the GEMM layout."""

from __future__ import annotations

from typing import Any

from hone.model.quantized.config_values import check, checked, group_size_of, only_scheme, skipping
from hone.model.quantized.scheme import Quantization, Scheme

_FIX = "hone reads awq with 4 bits and version gemm"


def read(values: dict[str, Any], where: str) -> Quantization:
    """From config.json's block. Raises ArtifactError for anything hone does not compute exactly.

    The block does not say whether all zero points are 8; hone adds `symmetric`, which other libraries ignore.
    """
    version = values.get("version") or values.get("checkpoint_format") or values.get("format") or "gemm"
    seen = {**values, "version": str(version).lower()}
    allowed = {"bits": (4,), "version": ("gemm",), "zero_point": (True, None), "symmetric": (True, False, None)}
    check(seen, allowed, where, _FIX)
    scheme = Scheme(4, group_size_of(values, where, _FIX), "awq", symmetric=bool(values.get("symmetric")))
    ignore = ("lm_head", *skipping(values.get("modules_to_not_convert")))
    return Quantization(((("Linear",), checked(scheme, where, _FIX)),), ignore, "awq")


def to_json(quantization: Quantization) -> dict[str, Any]:
    """The block that AutoAWQ, transformers and vLLM read."""
    scheme = only_scheme(quantization, "awq")
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": scheme.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "symmetric": scheme.symmetric,
        "modules_to_not_convert": list(quantization.ignore),
    }
