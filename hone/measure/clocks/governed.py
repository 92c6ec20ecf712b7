"""Work under a clock policy: opens the GPU, holds it, begins the policy, and gives all back at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.base.errors import MachineError, SpecError
from hone.base.spec import parse_scalar
from hone.measure.clocks import CLOCKS
from hone.measure.clocks.held import holding, restore_left
from hone.measure.clocks.nvml import Gpu, NvmlError, NvmlGpu, open_gpu
from hone.measure.clocks.policies.base import Governor

Open = Callable[[str], tuple[Gpu | None, str]]


def from_options(options: Mapping[str, str], device: str, *, waits: bool = False) -> dict[str, Any] | None:
    """The value of `Run.clock` from the options `clock.FIELD`; None without them.

    `waits`: the work waits for requests. Raises SpecError for a wrong policy or field, MachineError where `device` is no GPU.
    """
    named = {name.removeprefix("clock."): value for name, value in options.items() if name.startswith("clock.")}
    if not named:
        return None
    if "kind" not in named:
        given = ", ".join(f"--clock.{name}" for name in named)
        raise SpecError(f"{given} without a policy", fix=f"add --clock.kind=NAME, one of: {', '.join(CLOCKS)}")
    policy = CLOCKS.read({name: value if name == "kind" else parse_scalar(value) for name, value in named.items()})
    policy.check()
    if waits and policy.never_waits:
        raise SpecError(
            f"clock {policy.kind} compares seconds of a unit of work, and a server waits for requests",
            fix="find a setting with hone bench --clock.kind="
            + policy.kind
            + ", then serve with fixed, by_phase or thermal",
        )
    if not device.startswith("cuda"):
        raise MachineError(f"--clock sets the clock of a GPU, and this runs on {device}", fix="add --device=cuda")
    return policy.model_dump(mode="json")


@contextmanager
def governed(
    clock: Mapping[str, Any] | None, device: str, say: Callable[[str], None], *, open_one: Open = open_gpu
) -> Iterator[Governor | None]:
    """The governor of `device` under the policy `clock`; None without one, or where NVML does not show the device, which is said."""
    if clock is None:
        yield None
        return
    gpu, note = open_one(device)
    if gpu is None:
        say(f"note: clock {clock['kind']} sets nothing: {note}")
        yield None
        return
    with holding(gpu) as held:
        try:
            governor = CLOCKS.read(dict(clock)).begin(held, say=say)
        except NvmlError as error:  # it does not list its clocks or its limits
            governor = None
            say(f"note: clock {clock['kind']} sets nothing: {error}")
        yield governor


def restore_what_is_left(say: Callable[[str], None], folder: Path | None = None) -> None:
    """Restores the clocks that killed processes have set, and says so."""
    for line in restore_left(NvmlGpu, folder):
        say(f"note: {line}")
