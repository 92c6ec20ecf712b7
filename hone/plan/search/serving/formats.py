"""The formats of weights that a search tries, and which of them a kind of hardware runs fast."""

from __future__ import annotations

from collections.abc import Mapping

from hone.base.errors import SpecError, did_you_mean
from hone.plan.search.goal import Goal
from hone.plan.search.machines import Fleet, number_formats
from hone.plan.search.ways import Format

PLAIN = Format("16 bit", (), 16.0)
FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        PLAIN,
        Format("fp8", ({"kind": "fp8"},), 8.0),
        Format("int8", ({"kind": "rtn", "bits": 8, "group_size": 0},), 8.0),
        Format("int4 g128", ({"kind": "gptq", "bits": 4, "group_size": 128, "uneven": "nearest"},), 4.125),
        Format("int4 g32", ({"kind": "gptq", "bits": 4, "group_size": 32, "uneven": "nearest"},), 4.5),
        Format("int3 g128", ({"kind": "gptq", "bits": 3, "group_size": 128, "uneven": "nearest"},), 3.125),
        Format("nvfp4", ({"kind": "nvfp4"},), 4.5),
        Format("mxfp4", ({"kind": "mxfp4"},), 4.25),
    )
}
"""By name. Bits of a weight with its part of a scale of 16 bits (of 8 in nvfp4 and mxfp4)."""

FAST: Mapping[str, tuple[str, ...]] = {
    "intel-vnni": ("16 bit", "int8", "int4 g128", "int4 g32"),
    "nvidia-hopper": ("16 bit", "fp8", "int8", "int4 g128", "int4 g32"),
    "apple": ("16 bit", "int8", "int4 g128", "int4 g32"),
    "qualcomm": ("int8", "int4 g128", "int4 g32"),
}
"""The formats for which hardware has products or hone has kernels: VNNI multiplies int8; Hopper fp8 and int8, and int4 is widened in
kernels; Apple's GPU multiplies 16 bits and widens; Qualcomm's matrix unit multiplies int8 and int4."""


NUMBERS: Mapping[str, frozenset[str]] = {
    "16 bit": frozenset({"bfloat16", "float16"}),
    "fp8": frozenset({"float8"}),
    "int8": frozenset({"int8"}),
    "int4 g128": frozenset({"int4"}),
    "int4 g32": frozenset({"int4"}),
    "int3 g128": frozenset({"int3"}),
    "nvfp4": frozenset({"float4"}),
    "mxfp4": frozenset({"float4"}),
}
"""The number formats of the catalogue that a format of weights is made of."""


def formats_of(goal: Goal, fleet: Fleet) -> tuple[Format, ...]:
    """The formats to try on `fleet`: the goal's own, else those that run fast on its target. Raises SpecError for an unknown one."""
    names = goal.space.formats
    for name in names:
        if name not in FORMATS:
            raise SpecError(
                f"space.formats: there is no format '{name}'",
                fix=f"{did_you_mean(name, FORMATS)}known: {', '.join(FORMATS)}",
            )
    if not names:
        target = goal.target or ("nvidia-hopper" if fleet.on_gpu else "intel-vnni")
        gains = number_formats(target)
        fast = FAST[target] if gains is None else tuple(name for name in FORMATS if gains & NUMBERS[name])
        names = tuple(name for name in FORMATS if name in fast)
    if not goal.compresses:  # a model is served as it is
        return (PLAIN,)
    return tuple(FORMATS[name] for name in names)
