"""Which number formats a family of hardware, or an accelerator, multiplies as they are, and why."""

from __future__ import annotations

from typing import NamedTuple

from hone.base.errors import SpecError, did_you_mean
from hone.cost.catalogue.read import catalogue, targets
from hone.cost.catalogue.rows import Target


class Native(NamedTuple):
    """What hardware does with a number format."""

    native: bool
    """Whether it multiplies numbers of the format as they are; else they only take less memory."""
    why: str


def formats_of(target: str, hardware: str | None = None) -> dict[str, Native]:
    """What `target`, a family such as 'nvidia-hopper' or an accelerator such as 'H100', does with each number format.

    A format that is not there gains nothing: it is not read faster than a wider one. `hardware`: a user's file of rows. Raises
    SpecError for a target that is neither.
    """
    for family in targets():
        if family.name == target.lower():
            return _of(family)
    known = [one.name for one in targets()]
    rows = catalogue(hardware)
    try:
        row = rows.accelerator(target)
    except SpecError:
        near = did_you_mean(target, [*known, *(one.short for one in rows.accelerators)])
        raise SpecError(
            f"no target '{target}'", fix=f"{near}families: {', '.join(known)}; or an accelerator of `hone hardware`"
        ) from None
    family = family_of(row.name)
    if family is None:
        return {one: Native(True, f"{row.name} has it, by its row of the catalogue") for one in row.native}
    found = _of(family)
    for name, one in found.items():  # some are those of its newer members alone
        if one.native and name not in row.native:
            found[name] = Native(False, f"not known of {row.name}; of its family: {one.why}")
        elif not one.native and name in row.native:
            found[name] = Native(True, one.why)
    return found


def family_of(accelerator: str) -> Target | None:
    """The family of the accelerator of this name; None for one that is in none."""
    return next((one for one in targets() if accelerator in one.accelerators), None)


def _of(family: Target) -> dict[str, Native]:
    found = {name: Native(True, why) for name, why in family.formats.items()}
    return found | {name: Native(False, why) for name, why in family.stored.items()}
