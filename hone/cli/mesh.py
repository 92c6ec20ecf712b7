"""Ranks that a plan is for and that need not be there: `--mesh=1024xH200`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def planned_run(text: str, run: Any) -> Any:
    """`run` on as many ranks as `text` says, '16' of devices like this one or '1024xH200' of a GPU's data sheet.

    Nothing is measured for GPUs that are not here: estimates are bounds, and links have assumed rates. Raises SpecError
    for another text.
    """
    from hone.base.errors import SpecError
    from hone.base.mesh import Mesh
    from hone.cost.roofline import data_sheets
    from hone.measure.machine import Gpu, Machine

    count, times, name = text.replace("\u00d7", "x").partition("x")
    known = [row["match"] for row in data_sheets()]
    if not count.isdigit() or int(count) < 1 or (times and name not in known):
        gpus = ", ".join(known)
        raise SpecError(
            f"--mesh={text} is no number of ranks",
            fix=f"write --mesh=16, or --mesh=1024xH200; GPUs with a data sheet: {gpus}",
        )
    mesh = Mesh(0, 0, int(count))
    if not times:
        return replace(run, mesh=mesh)
    sheet = next(row for row in data_sheets() if row["match"] == name)
    gpu = Gpu(name=sheet["name"], memory_bytes=int(sheet["memory_bytes"]), capability="", num_multiprocessors=0)
    machine = Machine.model_validate(run.machine)
    there = machine.model_copy(update={"gpus": (gpu,), "device": "cuda", "calibration": None})
    return replace(run, mesh=mesh, device="cuda", machine=there.model_dump(mode="json"))
