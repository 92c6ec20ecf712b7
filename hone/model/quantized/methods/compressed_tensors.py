"""The `quantization_config` of compressed-tensors: groups of modules, each with a scheme, and Hadamard transforms of inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized.layouts import LAYOUTS, problem
from hone.model.quantized.scheme import (
    Activations,
    CacheScheme,
    InputHadamard,
    Quantization,
    ScaleFormat,
    Scheme,
)
from hone.ops.rounding.numbers import Number

_FLOATS: dict[int, Number] = {8: "e4m3", 4: "e2m1"}
"""Floating number formats of compressed-tensors by their bits."""
_SCALES: dict[ScaleFormat, str] = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
"""`scale_dtype` of scales of one byte."""
_BYTE_SCALES: dict[str, ScaleFormat] = {
    "nvfp4-pack-quantized": "e4m3",
    "mxfp4-pack-quantized": "e8m0",
    "mxfp8-quantized": "e8m0",
}
"""The format of scales that a layout has without saying so."""
_WEIGHTS: dict[str, tuple[bool, tuple[str, ...], tuple[int, ...]]] = {
    "pack-quantized": (True, ("group", "channel"), tuple(range(2, 9))),
    "int-quantized": (True, ("group", "channel", "block", "tensor"), (8,)),
    "float-quantized": (False, ("group", "channel", "block", "tensor"), (8,)),
    "nvfp4-pack-quantized": (False, ("tensor_group",), (4,)),
    "mxfp4-pack-quantized": (False, ("group",), (4,)),
    "mxfp8-quantized": (False, ("group",), (8,)),
}
"""Of a layout: whether its weights are integers, its strategies, its numbers of bits."""


def read(values: dict[str, Any], where: str) -> Quantization:
    """From config.json's block. Raises ArtifactError for anything hone does not compute exactly."""
    for key in ("sparsity_config",):
        if values.get(key):
            raise _unsupported(where, key, values[key])
    groups = []
    for name, group in (values.get("config_groups") or {}).items():
        if not isinstance(group, dict):
            raise _unsupported(where, f"config_groups.{name}", group)
        groups.append((tuple(group.get("targets", ())), _read_scheme(group, values, f"{where}: {name}")))
    cache = values.get("kv_cache_scheme")
    if not groups and not cache:
        raise _unsupported(where, "config_groups", values.get("config_groups"))
    hadamards = _read_transforms(values.get("transform_config") or {}, where)
    kv_cache = _read_cache(cache, where) if cache else None
    return Quantization(tuple(groups), tuple(values.get("ignore") or ()), hadamards=hadamards, kv_cache=kv_cache)


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
    layouts = {scheme.layout for _, scheme in quantization.groups} or {"dense"}
    transforms = {"transform_config": _transforms(quantization.hadamards)} if quantization.hadamards else {}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(quantization.ignore),
        "kv_cache_scheme": None if quantization.kv_cache is None else _cache(quantization.kv_cache),
        **transforms,
    }


def _cache(scheme: CacheScheme) -> dict[str, Any]:
    """The `kv_cache_scheme`; vLLM reads it for floats alone."""
    return {
        "num_bits": 8,
        "type": "int" if scheme.number == "int" else "float",
        "symmetric": True,
        "strategy": "attn_head" if scheme.per == "head" else "tensor",
        "dynamic": False,
    }


def _read_cache(values: Any, where: str) -> CacheScheme:
    """From `kv_cache_scheme`. Raises ArtifactError naming the field for one that hone does not compute."""
    wanted = {"num_bits": (8,), "type": ("float", "int"), "symmetric": (True,), "dynamic": (False, None)}
    wanted |= {"strategy": ("tensor", "attn_head")}
    for key, allowed in wanted.items():
        value = values.get(key) if isinstance(values, dict) else values
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise ArtifactError(
                f"{where}: quantization_config has kv_cache_scheme.{key} = {value!r}",
                fix="hone reads KV caches of 8 symmetric bits with calibrated scales, one a layer or one a KV head",
            )
    number: Literal["e4m3", "int"] = "int" if values["type"] == "int" else "e4m3"
    return CacheScheme(number, "head" if values["strategy"] == "attn_head" else "tensor")


def _transforms(hadamards: Iterable[InputHadamard]) -> dict[str, Any]:
    """`transform_config`: what is computed at run time. The weights hold their part, of which nothing is said here."""
    groups = {
        f"input_{one.size}": {
            "type": "hadamard",
            "apply": [
                {
                    "targets": list(one.targets),
                    "location": "input",
                    "inverse": False,
                    "ignore": list(one.ignore),
                }
            ],
            "randomize": False,
            "requires_grad": False,
            "head_dim": one.size,
            "precision": "torch.float32",
        }
        for one in hadamards
    }
    return {"config_groups": groups}


def _read_transforms(values: dict[str, Any], where: str) -> tuple[InputHadamard, ...]:
    """The Hadamard transforms of inputs. Raises ArtifactError for other transforms at run time; those of weights are in the weights."""
    found = []
    for name, group in (values.get("config_groups") or {}).items():
        key = f"transform_config.config_groups.{name}"
        for place in group.get("apply") or ():
            if place.get("location") in ("weight_input", "weight_output"):
                continue
            size = group.get("head_dim") or 0
            if group.get("type") != "hadamard" or group.get("randomize") or size & (size - 1):
                options = {option: group.get(option) for option in ("type", "randomize", "head_dim")}
                raise _unsupported(where, key, options)
            if place.get("location") != "input":
                raise _unsupported(where, f"{key}.location", place.get("location"))
            targets, ignore = (
                (one,) if isinstance(one, str) else tuple(one or ())
                for one in (place.get("targets"), place.get("ignore"))
            )
            found.append(InputHadamard(targets, size, ignore))
    return tuple(found)


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
    if scheme.scales != "float":
        weights["scale_dtype"] = _SCALES[scheme.scales]
    return weights if scheme.block is None else weights | {"block_structure": list(scheme.block)}


def _activations(activations: Activations | None) -> dict[str, Any] | None:
    """The `input_activations` block of a group."""
    if activations is None:
        return None
    local = activations.scales == "e4m3"
    values: dict[str, Any] = {
        "num_bits": activations.bits,
        "type": "int" if activations.number == "int" else "float",
        "symmetric": activations.symmetric,
        "strategy": "tensor_group" if local else activations.per,
        "group_size": activations.group_size or None,
        "dynamic": "local" if local else activations.dynamic,
    }
    return values if activations.scales == "float" else values | {"scale_dtype": _SCALES[activations.scales]}


def _read_scheme(group: dict[str, Any], values: dict[str, Any], where: str) -> Scheme:
    """The scheme of one config group. Raises ArtifactError naming the field for one that hone cannot run."""
    weights = group.get("weights") or {}
    if group.get("output_activations"):
        raise _unsupported(where, "output_activations", group["output_activations"])
    layout = group.get("format") or values.get("format")
    if layout not in LAYOUTS or LAYOUTS[layout].method != "compressed-tensors":
        raise _unsupported(where, "format", layout)
    where = f"{where} ({layout})"
    integers, strategies, widths = _WEIGHTS[layout]
    wanted: dict[str, tuple[Any, ...]] = {
        "type": ("int",) if integers else ("float",),
        "symmetric": (True, False) if integers else (True,),
        "strategy": strategies,
        "num_bits": widths,
        "actorder": (None, "static", "weight"),  # these two do not permute the columns
        "scale_dtype": (None, _SCALES.get(_BYTE_SCALES.get(layout, "float"))),
    }
    for key, allowed in wanted.items():
        if weights.get(key) not in allowed:
            raise _unsupported(where, f"weights.{key}", weights.get(key))
    bits, strategy, group_size, block = weights["num_bits"], weights["strategy"], 0, None
    if strategy in ("group", "tensor_group"):
        group_size = weights.get("group_size") or 0
        if group_size < 1:
            raise _unsupported(where, "weights.group_size", weights.get("group_size"))
    if strategy == "block":
        block = tuple(weights.get("block_structure") or ())
        if len(block) != 2 or not all(isinstance(length, int) and length > 0 for length in block):
            raise _unsupported(where, "weights.block_structure", weights.get("block_structure"))
    inputs = group.get("input_activations")
    scheme = Scheme(
        bits,
        group_size,
        layout,
        number="int" if integers else _FLOATS[bits],
        block=block,
        per_tensor=strategy == "tensor",
        symmetric=weights["symmetric"],
        activations=_read_activations(inputs, where) if inputs else None,
        scales=_BYTE_SCALES.get(layout, "float"),
    )
    reason = problem(scheme)
    if reason is not None:
        raise _unsupported(where, "format", f"{layout} ({reason})")
    return scheme


def _read_activations(values: dict[str, Any], where: str) -> Activations:
    """`input_activations` of a config group. Raises ArtifactError naming the field for a rounding that hone does not run."""

    def one_of(key: str, allowed: tuple[Any, ...]) -> Any:
        if values.get(key) not in allowed:
            raise _unsupported(where, f"input_activations.{key}", values.get(key))
        return values.get(key)

    integers = one_of("type", ("int", "float")) == "int"
    bits = one_of("num_bits", (8, 4))
    strategy = one_of("strategy", ("token", "tensor", "group", "tensor_group"))
    # One dynamic scale for a whole batch would make a sequence's result depend on the others.
    dynamic = one_of("dynamic", {"tensor": (False,), "tensor_group": ("local",)}.get(strategy, (True,)))
    grouped = strategy in ("group", "tensor_group")
    symmetric = one_of("symmetric", (True, False) if integers and not grouped else (True,))
    byte_scales = {"tensor_group": ("e4m3",), "group": ("float", "e8m0")}.get(strategy, ("float",))
    stated = one_of("scale_dtype", (None, *(_SCALES.get(kind) for kind in byte_scales)))
    scales = next((kind for kind in byte_scales if _SCALES.get(kind) == stated), byte_scales[0])
    size = values.get("group_size") or 0
    if grouped and size < 1:
        raise _unsupported(where, "input_activations.group_size", values.get("group_size"))
    per = "group" if grouped else strategy
    number = "int" if integers else _FLOATS[bits]
    return Activations(bits, number, dynamic is not False, per, symmetric, size if grouped else 0, scales)


def _unsupported(where: str, key: str, value: Any) -> ArtifactError:
    return ArtifactError(
        f"{where}: quantization_config has {key} = {value!r}",
        fix="hone reads weights of 2 to 8 bit integers, fp8, NVFP4 and MX formats, with inputs rounded to 8 or 4 bits: "
        "per token or group while running, or per tensor by calibration, and multiplied by Hadamard matrices whose size is "
        "a power of two",
    )
