"""Translation between the rotary fields of config.json and those of `Rope`, in the forms of transformers 4 and 5."""

from __future__ import annotations

import math
from typing import Any

from hone.base.errors import SpecError
from hone.model.families.base import Family

_OLD_NAMES = {"su": "longrope"}
_ATTENTION = ("full_attention", "sliding_attention")


def read_rope(values: dict[str, Any], family: Family, where: str, windowed: bool = False) -> dict[str, Any]:
    """The fields of `Rope` for layers without a window, or `windowed` ones, which some families rotate otherwise.

    They come as rope_parameters (transformers 5; keyed by layer type where layers differ) or as rope_theta and
    rope_scaling (4). Raises SpecError naming what is not supported or missing.
    """
    theta, (old, new) = "rope_theta", both_forms(values, where)
    if windowed and family.local_theta:
        theta, old = family.local_theta, {}
    if any(kind in new for kind in _ATTENTION):
        if not family.local_theta:
            raise SpecError(
                f"{where}: rope_parameters differ by layer type, which hone cannot run for this model_type",
                fix="supported are families with local layers: gemma3_text",
            )
        new = new.get(_ATTENTION[windowed]) or {}
        if not isinstance(new, dict):
            raise SpecError(f"{where}: rope_parameters.{_ATTENTION[windowed]} is {new!r}", fix="give it its fields")
    elif windowed and family.local_theta:
        new = {}
    scaling = {**old, **new}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    base = scaling.get("rope_theta", values.get(theta, 10000.0))
    if kind not in family.rope_scalings:
        raise SpecError(
            f"{where}: rope_scaling is of type {kind!r}, which hone cannot run",
            fix=f"supported are: {', '.join(family.rope_scalings)}",
        )
    if kind == "default":
        return {"theta": base}
    longest = positive(values, "max_position_embeddings", where)
    # A field of its own beside the scaling comes first, as in transformers 5.
    name = "original_max_position_embeddings"
    original = positive(values if values.get(name) else scaling, name, where, longest)
    inside = f"{where}: rope_scaling of type {kind!r}"
    factor = positive(scaling, "factor", inside, longest / original if kind in ("yarn", "longrope") else None)
    found = {"theta": base, "scaling": kind, "factor": factor}
    if kind == "dynamic":
        return {**found, "original_max_seq_len": longest}
    if kind == "linear":
        return found
    found["original_max_seq_len"] = original
    if kind == "llama3":
        names = ("low_freq_factor", 1.0), ("high_freq_factor", 4.0)
        return {**found, **{name: scaling.get(name, default) for name, default in names}}
    if kind == "yarn":
        found |= {"beta_fast": scaling.get("beta_fast") or 32.0, "beta_slow": scaling.get("beta_slow") or 1.0}
        found["truncate"] = scaling.get("truncate", True)
    else:
        found["factor"] = max(1.0, factor)
        for name in ("short_factor", "long_factor"):
            if not isinstance(scaling.get(name), list):
                raise SpecError(f"{inside} has no list {name}", fix=f"add rope_scaling.{name}")
            found[name] = scaling[name]
    inferred = _attention_factor(kind, factor, original, scaling, inside)
    found["attention_factor"] = positive(scaling, "attention_factor", inside, inferred)
    return found


def both_forms(values: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """rope_scaling and rope_parameters, empty where config.json has none. Raises SpecError for anything but mappings."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(name) or {}, dict):
            raise SpecError(f"{where}: {name} is {values[name]!r}", fix=f"give {name} its fields, or remove it")
    return values.get("rope_scaling") or {}, values.get("rope_parameters") or {}


def positive(values: dict[str, Any], name: str, where: str, default: float | None = None) -> Any:
    """values[name], a number above 0; `default` where it is left out or null. Raises SpecError for anything else."""
    value = values.get(name)
    value = default if value is None else value
    if value is None:
        raise SpecError(f"{where} has no {name}", fix=f"add {name}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise SpecError(f"{where}: {name} is {value!r}", fix=f"set {name} to a number above 0")
    return value


def _attention_factor(kind: str, factor: float, original: int, scaling: dict[str, Any], where: str) -> float:
    """What transformers multiplies rotated queries and keys with where the config does not say it."""
    if kind == "longrope":
        return 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if not scaling.get("mscale") or not scaling.get("mscale_all_dim"):
        return mscale(1.0)
    return mscale(positive(scaling, "mscale", where)) / mscale(positive(scaling, "mscale_all_dim", where))


def write_rope_scaling(rope: Any) -> dict[str, Any] | None:
    """rope_scaling of config.json (null: none); rope_theta stands beside it."""
    if rope.scaling == "none":
        return None
    found: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("linear", "dynamic"):
        return found
    if rope.scaling == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    elif rope.scaling == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    else:
        found |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    if rope.scaling in ("yarn", "longrope"):
        found["attention_factor"] = rope.attention_factor
    return {**found, "original_max_position_embeddings": rope.original_max_seq_len}
