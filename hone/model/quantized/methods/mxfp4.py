"""The `quantization_config` of gpt-oss: the experts of every layer in MXFP4, all of one layer in one tensor."""

from __future__ import annotations

from typing import Any

from hone.model.quantized.config_values import check, checked, skipping
from hone.model.quantized.layouts.mxfp4 import GROUP_SIZE
from hone.model.quantized.scheme import Quantization, Scheme

EXPERTS = r"re:.*\.experts\.\d+\.(gate|up|down)_proj$"
"""The modules of which blocks are stored."""
SCHEME = Scheme(4, GROUP_SIZE, "mxfp4", number="e2m1", scales="e8m0")
_FIX = "hone reads experts in blocks of 32 four-bit floats (e2m1) with a power of two each, as gpt-oss has them"


def read(values: dict[str, Any], where: str) -> Quantization:
    """From config.json's block; `dequantize` there is how transformers computes with them. Raises ArtifactError for any other."""
    check(values, {"dequantize": (True, False, None)}, where, _FIX)
    groups = (((EXPERTS,), checked(SCHEME, where, _FIX)),)
    return Quantization(groups, skipping(values.get("modules_to_not_convert")), "mxfp4")


def to_json(quantization: Quantization) -> dict[str, Any]:
    """The block that transformers and vLLM read."""
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(quantization.ignore)}
