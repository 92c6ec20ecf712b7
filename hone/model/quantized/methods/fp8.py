"""The `quantization_config` of fine-grained fp8 checkpoints (transformers, vLLM, DeepSeek-V3)."""

from __future__ import annotations

from typing import Any

from hone.model.quantized.config_values import check, checked, only_scheme, skipping, unsupported
from hone.model.quantized.scheme import Quantization, Scheme

_FIX = (
    "hone reads fp8 weights with a float32 scale per block and inputs rounded at run time (activation_scheme dynamic)"
)
_ROUTERS = r"re:.*\.(mlp|block_sparse_moe)\.gate$"
"""Routers of experts: no linears in transformers, so that no list names them, and never quantized."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
    "modules_to_convert": ([], None),
}


def read(values: dict[str, Any], where: str) -> Quantization:
    """From config.json's block. Raises ArtifactError for anything else than weights in blocks.

    `activation_scheme` dynamic lets a GPU's fp8 product round a linear's inputs; hone multiplies the dequantized weights,
    as transformers does on a CPU.
    """
    check(values, _ALLOWED, where, _FIX)
    block = values.get("weight_block_size", (128, 128))
    if not isinstance(block, list | tuple) or [type(length) for length in block] != [int, int] or min(block) < 1:
        raise unsupported(where, "weight_block_size", block, _FIX)
    scheme = Scheme(8, layout="fp8", number="e4m3", block=(block[0], block[1]))
    skipped = values.get("modules_to_not_convert")
    skipped = values.get("ignored_layers") if skipped is None else skipped
    skipped = ["lm_head"] if skipped is None else skipped  # without a list transformers leaves the head alone
    return Quantization(((("Linear",), checked(scheme, where, _FIX)),), (*skipping(skipped), _ROUTERS), "fp8")


def to_json(quantization: Quantization) -> dict[str, Any]:
    """The block that transformers and vLLM read."""
    block = only_scheme(quantization, "fp8").block
    assert block is not None, "fp8 without blocks"
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": list(quantization.ignore),
    }
