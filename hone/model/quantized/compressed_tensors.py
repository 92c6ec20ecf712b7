"""The `quantization_config` of compressed-tensors: groups of modules, each with a scheme."""

from __future__ import annotations

from typing import Any

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized.layouts import problem
from hone.model.quantized.scheme import Activations, Quantization, Scheme

_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FLOATS = {8: "e4m3", 4: "e2m1"}
"""Floating number formats of compressed-tensors by their bits."""


def read(values: dict[str, Any], where: str) -> Quantization:
    """From config.json's block. Raises ArtifactError for anything hone does not compute exactly."""
    for key in ("sparsity_config", "kv_cache_scheme", "transform_config"):
        if values.get(key):
            raise _unsupported(where, key, values[key])
    groups = []
    for name, group in (values.get("config_groups") or {}).items():
        if not isinstance(group, dict):
            raise _unsupported(where, f"config_groups.{name}", group)
        groups.append((tuple(group.get("targets", ())), _read_scheme(group, values, f"{where}: {name}")))
    if not groups:
        raise _unsupported(where, "config_groups", values.get("config_groups"))
    return Quantization(tuple(groups), tuple(values.get("ignore") or ()))


def to_json(quantization: Quantization) -> dict[str, Any]:
    """The block that transformers and vLLM read. `format` stands in every group: without it, readers infer it."""
    groups = {
        f"group_{position}": {
            "targets": list(targets),
            "weights": _weights(scheme),
            "input_activations": _activations(scheme.activations),
            "output_activations": None,
            "format": scheme.layout,
        }
        for position, (targets, scheme) in enumerate(quantization.groups)
    }
    layouts = {scheme.layout for _, scheme in quantization.groups}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(quantization.ignore),
        "kv_cache_scheme": None,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    """The `weights` of a group. Raises SpecError for a number format that compressed-tensors does not have."""
    if scheme.number not in ("int", *_FLOATS.values()):
        raise SpecError(
            f"compressed-tensors cannot store {scheme.number} weights",
            fix="quantize to e4m3, which every library reads",
        )
    weights = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.number == "int" else "float",
        "symmetric": scheme.symmetric,
        "strategy": scheme.strategy,
        "group_size": scheme.group_size or None,
        "dynamic": False,
    }
    return weights if scheme.block is None else weights | {"block_structure": list(scheme.block)}


def _activations(activations: Activations | None) -> dict[str, Any] | None:
    """The `input_activations` block of a group."""
    if activations is None:
        return None
    return {
        "num_bits": activations.bits,
        "type": "int" if activations.number == "int" else "float",
        "symmetric": activations.symmetric,
        "strategy": activations.per,
        "group_size": None,
        "dynamic": activations.dynamic,
    }


def _read_scheme(group: dict[str, Any], values: dict[str, Any], where: str) -> Scheme:
    """The scheme of one config group. Raises ArtifactError naming the field for one that hone cannot run."""
    weights = group.get("weights") or {}
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise _unsupported(where, key, group[key])
    layout = group.get("format") or values.get("format")
    if layout not in _LAYOUTS:
        raise _unsupported(where, "format", layout)
    bits = weights.get("num_bits")
    wanted: dict[str, tuple[Any, ...]] = {
        "type": ("float",) if layout == "float-quantized" else ("int",),
        "symmetric": (True,) if layout == "float-quantized" else (True, False),
        "strategy": ("group", "channel") if layout == "pack-quantized" else ("group", "channel", "block", "tensor"),
        "num_bits": tuple(range(2, 9)) if layout == "pack-quantized" else (8,),
        "actorder": (None, "static", "weight"),  # these two do not permute the columns
    }
    for key, allowed in wanted.items():
        if weights.get(key) not in allowed:
            raise _unsupported(where, f"weights.{key}", weights.get(key))
    strategy, group_size, block = weights["strategy"], 0, None
    if strategy == "group":
        group_size = weights.get("group_size") or 0
        if group_size < 1:
            raise _unsupported(where, "weights.group_size", weights.get("group_size"))
    if strategy == "block":
        block = tuple(weights.get("block_structure") or ())
        if len(block) != 2 or not all(isinstance(length, int) and length > 0 for length in block):
            raise _unsupported(where, "weights.block_structure", weights.get("block_structure"))
    scheme = Scheme(
        bits,
        group_size,
        layout,
        number="int" if weights["type"] == "int" else _FLOATS[bits],
        block=block,
        per_tensor=strategy == "tensor",
        symmetric=weights["symmetric"],
    )
    reason = problem(scheme)
    if reason is not None:
        raise _unsupported(where, "format", f"{layout} ({reason})")
    return scheme


def _unsupported(where: str, key: str, value: Any) -> ArtifactError:
    return ArtifactError(
        f"{where}: quantization_config has {key} = {value!r}",
        fix="hone reads quantized weights alone: int (2 to 8 bits) in pack-quantized or int-quantized, fp8 in float-quantized",
    )
