"""Ranks that a plan is for and that need not be there: `--mesh=1024xH200`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.measure.machine import Machine


def planned_run(text: str, run: Any) -> Any:
    """`run` on as many ranks as `text` says, '16' of devices like this one or '1024xH200' of a GPU's data sheet.

    Nothing is measured for GPUs that are not here: estimates are bounds, and links have assumed rates. Raises SpecError
    for another text.
    """
    from hone.base.errors import SpecError
    from hone.base.ranks import Mesh
    from hone.cost.catalogue.read import catalogue
    from hone.measure.machine import machine_of

    count, times, name = text.replace("\u00d7", "x").partition("x")
    known = [one for one in catalogue().accelerators if one.kind == "gpu" and one.memory_bytes is not None]
    short = [one.short for one in known]
    if not count.isdigit() or int(count) < 1 or (times and not name):
        raise SpecError(f"--mesh={text} is no number of ranks", fix="write --mesh=16, or --mesh=1024xH200")
    mesh = Mesh(0, 0, int(count))
    machine = machine_of(run)
    if not times:
        return replace(run, mesh=mesh, machine=_described(machine))
    sheet = catalogue().accelerator(name)
    if sheet not in known:
        said = "no GPU" if sheet.kind != "gpu" else "of unknown memory"
        raise SpecError(f"--mesh={text}: {sheet.name} is {said}", fix=f"plans are made for {', '.join(short)}")
    there = machine.model_copy(update={"gpus": (sheet.gpu(),), "device": "cuda", "calibration": None})
    return replace(run, mesh=mesh, device="cuda", machine=_described(there))


def _described(machine: Machine) -> dict[str, Any]:
    """`machine` as `Run` holds it; artifacts do not record that it is planned."""
    return {**machine.model_dump(mode="json"), "planned": True}
