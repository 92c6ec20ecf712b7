"""`--numa_binding`: where the processes of a command run; for ranks and for processes with a GPU, this one is bound."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hone.measure.topology.pin import SETTING, asked, bind, checked, place_of

if TYPE_CHECKING:
    from hone.base.run import Run

OPTION = "numa_binding"


def take(options: Mapping[str, str]) -> None:
    """Gives the option to this process and those it starts, by the environment. Raises SpecError for an unknown value, there too."""
    if OPTION in options:
        os.environ[SETTING] = checked(options[OPTION], f"--{OPTION}")
    asked()


def bind_rank(run: Run) -> None:
    """Binds this process to its share where it is one of several ranks of this machine, or has a GPU; says so once.

    The memory that it pins for copies to its GPU, and what is offloaded to the host, then comes from the GPU's node. A process that computes
    alone on a CPU uses all nodes. One that starts worker processes for data is not bound: they would all be on its node.
    """
    from hone.measure.machine import describe

    mesh = run.mesh
    ranks = mesh.local_world_size or mesh.world_size
    gpu = run.device.startswith("cuda")
    if (ranks == 1 and not gpu) or run.executor.get("kind") != "serial":
        if run.executor.get("kind") == "serial" and asked() not in ("auto", "none"):
            run.say(f"--{OPTION}={asked()}: one process on a CPU is not bound, it uses all nodes")
        return
    local = mesh.local_rank if ranks > 1 else 0
    placement = place_of(local, ranks, run.device)
    bound = bind(placement.shares[local])
    if bound.said:
        run.say(f"rank 0: {bound.said}" if ranks > 1 else bound.said)
        describe.cache_clear()
        run.machine = describe(run.device).model_dump(mode="json")
    elif placement.why and os.environ.get(SETTING, "auto") != "auto":
        run.say(placement.why)
