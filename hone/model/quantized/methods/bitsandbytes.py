"""The `quantization_config` of bitsandbytes checkpoints: NF4, FP4 and LLM.int8."""

from __future__ import annotations

from typing import Any

from hone.model.quantized.config_values import check, checked, only_scheme, skipping, unsupported
from hone.model.quantized.scheme import Quantization, Scheme

BLOCK = 64
"""Weights that share a scale in the 4-bit formats, unless `bnb_4bit_blocksize` says otherwise: a key that hone adds,
because bitsandbytes has the number only beside the weights."""

_FIX = "hone reads load_in_4bit (nf4, fp4) with quant_storage uint8, and load_in_8bit without fp16 weights"
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bnb_4bit_quant_type": ("nf4", "fp4", None),
    "bnb_4bit_use_double_quant": (True, False, None),
    "bnb_4bit_quant_storage": ("uint8", None),
    "bnb_4bit_blocksize": (32, 64, 128, 256, 512, 1024, 2048, 4096, None),
    "llm_int8_has_fp16_weight": (False, None),
}


def read(values: dict[str, Any], where: str) -> Quantization:
    """From config.json's block. Raises ArtifactError for anything hone does not compute exactly.

    bitsandbytes rounds the inputs of LLM.int8 too, but for outliers above `llm_int8_threshold`; hone multiplies the
    dequantized weights with unrounded inputs.
    """
    check(values, _ALLOWED, where, _FIX)
    if values.get("load_in_8bit") or values.get("_load_in_8bit"):
        scheme = Scheme(8, layout="llm-int8")
    elif values.get("load_in_4bit") or values.get("_load_in_4bit"):
        number = values.get("bnb_4bit_quant_type") or "fp4"
        nested = "-nested" if values.get("bnb_4bit_use_double_quant") else ""
        scheme = Scheme(4, values.get("bnb_4bit_blocksize") or BLOCK, number + nested, number=number)
    else:
        raise unsupported(where, "load_in_4bit and load_in_8bit", False, _FIX)
    skipped = values.get("llm_int8_skip_modules")
    skipped = ["lm_head"] if skipped is None else skipped  # without a list transformers leaves the head alone
    return Quantization(((("Linear",), checked(scheme, where, _FIX)),), skipping(skipped), "bitsandbytes")


def to_json(quantization: Quantization) -> dict[str, Any]:
    """The block that transformers reads; `Quantization.options` has the dtype of products and the outlier threshold."""
    scheme = only_scheme(quantization, "bitsandbytes")
    four = scheme.bits == 4
    values: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four,
        "load_in_8bit": not four,
        "bnb_4bit_quant_type": scheme.number if four else "fp4",
        "bnb_4bit_use_double_quant": four and scheme.layout.endswith("-nested"),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(quantization.ignore),
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        **quantization.options,
    }
    if four and scheme.group_size != BLOCK:
        values["bnb_4bit_blocksize"] = scheme.group_size
    return values
