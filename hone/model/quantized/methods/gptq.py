"""The `quantization_config` of GPTQ checkpoints (AutoGPTQ, GPTQModel, transformers), versions 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hone.base.errors import SpecError
from hone.model.quantized.config_values import check, checked, group_size_of, unsupported
from hone.model.quantized.scheme import Quantization, Scheme

_FIX = "hone reads gptq and gptq_v2 with 2, 3, 4 or 8 bits packed in int32"
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 8),
    "sym": (True, False, None),
    "desc_act": (True, False, None),
    "lm_head": (True, False, None),
    "pack_dtype": ("int32", None),
    "is_marlin_format": (False, None),
}
_FUSED_IN_VLLM = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


def read(values: dict[str, Any], where: str) -> Quantization:
    """From config.json's block. Raises ArtifactError for anything hone does not compute exactly.

    `dynamic` maps "-:pattern" (not quantized) and "+:pattern" (other bits ...) to values that replace the general ones.
    """
    layout = values.get("checkpoint_format") or values.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported(where, "checkpoint_format", layout, _FIX)
    groups, ignore = [], [] if values.get("lm_head") else ["lm_head"]
    for key, changes in (values.get("dynamic") or {}).items():
        pattern = key.removeprefix("-:").removeprefix("+:")
        try:
            re.compile(pattern)
        except re.error:
            raise unsupported(where, "dynamic", key, _FIX) from None
        if key.startswith("-:"):
            ignore.append(f"re:{pattern}")
        else:
            groups.append(((f"re:{pattern}",), _scheme({**values, **(changes or {})}, layout, f"{where}: {key}")))
    inside = values.get("modules_in_block_to_quantize")
    targets = tuple(rf"re:.*{re.escape(name)}$" for names in inside for name in names) if inside else ("Linear",)
    groups.append((targets, _scheme(values, layout, where)))
    return Quantization(tuple(groups), tuple(ignore), "gptq")


def to_json(quantization: Quantization) -> dict[str, Any]:
    """The block that GPTQModel, transformers and vLLM read; modules that differ or are ignored are named in `dynamic`."""
    *others, (_, scheme) = quantization.groups
    kept = [name for name in quantization.ignore if name != "lm_head"]
    dynamic: dict[str, Any] = {f"-:{_exactly(name)}": {} for name in (*kept, *_fused(kept))}
    for targets, other in others:
        if (other.symmetric, other.layout) != (scheme.symmetric, scheme.layout):
            raise SpecError("gptq stores all modules symmetric or none", fix="use layout pack-quantized")
        changes = {"bits": other.bits, "group_size": other.group_size or -1}
        dynamic |= {f"+:{_exactly(name)}": changes for name in (*targets, *_fused(targets))}
    return {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": scheme.group_size or -1,
        "desc_act": scheme.permuted,
        "sym": scheme.symmetric,
        "lm_head": "lm_head" not in quantization.ignore,
        "checkpoint_format": scheme.layout,
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _fused(names: Iterable[str]) -> dict[str, None]:
    """The names of vLLM's linears that hold some of `names`, by which it looks up `dynamic`."""
    parts = ((name.rpartition("."), _FUSED_IN_VLLM) for name in names)
    return {f"{block}.{fused[last]}": None for (block, _, last), fused in parts if last in fused}


def _exactly(name: str) -> str:
    return rf"^{re.escape(name)}$"


def _scheme(values: dict[str, Any], layout: str, where: str) -> Scheme:
    check(values, _ALLOWED, where, _FIX)
    symmetric, permuted = values.get("sym", True), bool(values.get("desc_act"))
    size = group_size_of(values, where, _FIX)
    # A single group has no order of columns to keep.
    scheme = Scheme(values["bits"], size, layout, symmetric=symmetric is not False, permuted=permuted and size > 0)
    return checked(scheme, where, _FIX)
