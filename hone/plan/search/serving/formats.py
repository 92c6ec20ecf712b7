"""The formats of weights that a search tries, and which of them a kind of hardware runs fast."""

from __future__ import annotations

from collections.abc import Mapping

from hone.base.errors import SpecError, did_you_mean
from hone.cost.catalogue.formats import formats_of as number_formats
from hone.cost.catalogue.read import catalogue
from hone.plan.search.goal import Goal
from hone.plan.search.machines import Fleet
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

NUMBERS: Mapping[str, frozenset[str]] = {
    "16 bit": frozenset({"float32", "bfloat16", "float16"}),
    "fp8": frozenset({"float8"}),
    "int8": frozenset({"int8"}),
    "int4 g128": frozenset({"int4"}),
    "int4 g32": frozenset({"int4"}),
    "int3 g128": frozenset({"int3"}),
    "nvfp4": frozenset({"nvfp4"}),
    "mxfp4": frozenset({"mxfp4"}),
}
"""The number formats of the catalogue that a format of weights is made of; a model of 16 bits is served in float32 where that is faster."""


def _target_of(fleet: Fleet) -> str:
    """What the catalogue calls the hardware of `fleet`: its accelerator, or the family of a processor that no data sheet is of."""
    row = catalogue().of_processor(fleet.machine.processor)
    if row is not None:
        return row.name
    return "nvidia-hopper" if fleet.on_gpu else "intel-vnni"


MIXED = "mixed"
"""In `space.formats` all formats whose matrices have several bits."""


def formats_of(goal: Goal, fleet: Fleet, mixed: tuple[Format, ...] = ()) -> tuple[Format, ...]:
    """The formats to try on `fleet`: the goal's own, else those that run fast on its target; of `mixed` those whose bits all do. Raises
    SpecError for an unknown one."""
    names, known = goal.space.formats, (*FORMATS, MIXED)
    for name in names:
        if name not in known:
            raise SpecError(
                f"space.formats: there is no format '{name}'",
                fix=f"{did_you_mean(name, known)}known: {', '.join(known)}",
            )
    if not names:
        gains = set(number_formats(goal.target or _target_of(fleet)))
        names = tuple(name for name in FORMATS if gains & NUMBERS[name])
        mixed = tuple(one for one in mixed if {f"int{bits}" for bits in (one.allocation or {})["bits"]} <= gains)
    elif MIXED not in names:
        mixed = ()
    if not goal.compresses:  # a model is served as it is
        return (PLAIN,)
    return (*(FORMATS[name] for name in names if name != MIXED), *mixed)
