"""A model's quantization: which modules of a checkpoint are quantized and how, read from config.json and written to it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized.scheme import Quantization

METHODS = {
    "compressed-tensors": "hone.model.quantized.methods.compressed_tensors",
    "gptq": "hone.model.quantized.methods.gptq",
    "awq": "hone.model.quantized.methods.awq",
    "fp8": "hone.model.quantized.methods.fp8",
    "bitsandbytes": "hone.model.quantized.methods.bitsandbytes",
    "mxfp4": "hone.model.quantized.methods.mxfp4",
    "low_rank": "hone.model.quantized.low_rank",
}
"""`quant_method` of config.json -> the module that reads and writes that block: `read(values, where)` -> Quantization,
`to_json(quantization)` -> dict."""


def read(values: Any, where: str = "config.json") -> Quantization:
    """From config.json's `quantization_config`. Raises ArtifactError for anything hone does not compute exactly."""
    method = values.get("quant_method") if isinstance(values, dict) else values
    if method not in METHODS:
        raise ArtifactError(
            f"{where}: quantization_config has quant_method {method!r}",
            fix=f"hone reads {', '.join(METHODS)} weights; start from the unquantized checkpoint instead",
        )
    return import_module(METHODS[method]).read(values, where)


def to_json(quantization: Quantization) -> dict[str, Any]:
    """The `quantization_config` that transformers and vLLM read. Raises SpecError where its format lacks a part."""
    if quantization.hadamards and quantization.method != "compressed-tensors":
        raise SpecError(
            f"{quantization.method} cannot say that inputs are multiplied by Hadamard matrices",
            fix="quantize to a layout of compressed-tensors, such as pack-quantized, or rotate with r4=false",
        )
    return import_module(METHODS[quantization.method]).to_json(quantization)


def input_hadamard(values: dict[str, Any], module: str, columns: int) -> int:
    """Size of the Hadamard matrices with which the inputs of checkpoint module `module` are multiplied; 0 for none.

    Raises ArtifactError for a size that does not divide its `columns` input features, or is no power of two.
    """
    if _factored(values):
        return 0
    size = read(values).hadamard(module, columns)
    if size and (columns % size or size & (size - 1)):
        raise ArtifactError(
            f"{module} has {columns} input features, and transform_config multiplies blocks of {size}",
            fix="hone computes Hadamard matrices whose size is a power of two that divides the input features",
        )
    return size


def linear_of(values: dict[str, Any], module: str, columns: int = 0) -> tuple[str, dict[str, Any]] | None:
    """The LINEARS row and options for checkpoint module `module` of `columns` input features under config.json's `quantization_config`.

    None for a dense module. Without `columns` it is unknown whether blocks divide them, which they need not where they are dequantized. Raises ArtifactError for a config hone does not compute exactly.
    """
    if _factored(values):
        from hone.model.quantized.low_rank import is_factored

        return ("low_rank", {}) if is_factored(values, module) else None
    found = read(values).scheme(module)
    if found is None:
        return None
    if found.activations is not None:
        return "rounded_inputs", {"scheme": found}
    if found.number in ("nf4", "fp4"):
        return "nf4", {"scheme": found}
    plain = found.number == "int" and found.symmetric and not found.permuted
    whole = found.block is not None and columns > 0 and columns % found.block[1] == 0
    return "packed_int" if plain and (whole or found.strategy in ("group", "channel")) else "dequantizing", {
        "scheme": found
    }


def _factored(values: Any) -> bool:
    """Whether the modules are low-rank factors, which have no scheme."""
    return isinstance(values, dict) and values.get("quant_method") == "low_rank"
