"""Offload techniques: what of a training's state leaves the device, and where to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.spec import Circumstance
from hone.base.table import Technique
from hone.cost.train.offload import Left
from hone.cost.train.rates import Rates
from hone.measure.machine import Machine


class Offload(Technique):
    """Where optimizer state, master weights, gradients and parameters are."""

    to_files: ClassVar[bool] = False

    @property
    def exact(self) -> bool:
        """Whether losses and weights are those of a training that is all on the device."""
        return True

    @property
    def leaves(self) -> bool:
        """Whether anything leaves the device."""
        return False

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the options that are set, by which more leaves or updates are delayed."""
        return ()

    @property
    def left(self) -> Left | None:
        """What leaves the device, for estimates; None: nothing."""
        return None

    def rates(self, machine: Machine) -> Rates:
        """The rates of `machine`, and of the disk of its files, which is measured once."""
        from hone.train.offload.rates import rates_of  # it measures disks

        return rates_of(machine, scratch_of(self))

    def within(self, folder: Path) -> Offload:
        """The same with scratch files in `folder`, where it has some and no folder is set."""
        return self

    def with_axes(self, taken: Mapping[str, int]) -> None:
        """Raises ValueError where it does not work with ranks that are not data-parallel: degrees by their field."""

    def fits(self, *, precision: str, ends_early: bool, copies_state: bool) -> None:
        """Raises ValueError where it does not work with a `precision`, an early end, or copies of the state in the host's memory."""

    def ready(self, num_ranks: int, num_shards: int) -> Offload:
        """This technique as a trainer takes it. Raises SpecError where `num_ranks` ranks, of which `num_shards` share a copy of the
        optimizer state, cannot train so."""
        return self


class Resident(Offload):
    """Optimizer state and float32 master weights are on the device."""


class Host(Offload):
    """Optimizer state and float32 masters are in the host's memory, where the step is computed; gradients come and weights go beside it. Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840."""

    paper: ClassVar[str] = "arXiv:2101.06840"

    gradients: bool = Field(
        False, description="Gradients go there as the backward pass makes them, and are summed there."
    )
    parameters: bool = Field(
        False, description="Layers' weights wait there, two layers are on the device at a time; gradients go there too."
    )
    delayed_update: bool = Field(
        False,
        description="The step is computed beside the next step's passes, which use the weights before it; gradients go there too.",
    )
    delayed_update_after: int = Field(40, ge=0, description="Steps before updates are delayed.")

    @property
    def exact(self) -> bool:
        """Not with delayed updates."""
        return not self.delayed_update

    @property
    def leaves(self) -> bool:
        """The state does."""
        return True

    @property
    def chosen(self) -> tuple[str, ...]:
        """As `Offload.chosen`."""
        return tuple(name for name in ("gradients", "parameters", "delayed_update") if getattr(self, name))

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients are summed on the host."""
        return self.gradients or self.streams or self.delayed_update

    @property
    def streams(self) -> bool:
        """Whether layers' parameters come for their passes."""
        return self.parameters

    @property
    def streams_files(self) -> bool:
        """Whether they come from files."""
        return False

    @property
    def memory_bytes(self) -> int:
        """Bytes of the state of which the rest is in files; 0 where there are none."""
        return 0

    @property
    def left(self) -> Left | None:
        """As `Offload.left`."""
        moved = self.gradients_leave, self.streams, self.streams_files, self.delayed_update
        return Left(*moved, to_files=self.to_files, memory_bytes=self.memory_bytes)

    @property
    def scratch(self) -> str:
        """The folder of a trainer's scratch files; '': there are none."""
        return ""

    def with_axes(self, taken: Mapping[str, int]) -> None:
        """As `Offload.with_axes`."""
        if max(degree for field, degree in taken.items() if field != "context_parallel_degree") > 1:
            raise ValueError(
                f"offload {self.kind} works with data-parallel ranks (zero1, zero2, zero3) and context parallelism only"
            )

    def fits(self, *, precision: str, ends_early: bool, copies_state: bool) -> None:
        """As `Offload.fits`."""
        if self.delayed_update and ends_early:
            raise ValueError(
                "offload.delayed_update has no last update that an early_stopping could wait for: give one of them"
            )
        if self.streams and precision.startswith("fp8"):
            raise ValueError(f"offload.parameters works in fp32, bf16 and fp16, not in {precision}")
        if self.to_files and copies_state:
            raise ValueError(
                f"offload {self.kind} has its state in files because memory is short: checkpoint.async_mode async would copy it there"
            )

    def ready(self, num_ranks: int, num_shards: int) -> Offload:
        """Several ranks have their shares of the state on the host, nothing else: copies of it all would not be fewer bytes."""
        if num_ranks == 1:
            return self
        if num_shards == 1:
            raise SpecError(
                f"offload {self.kind} on {num_ranks} ranks would keep {num_ranks} copies of the whole state on the host",
                fix="set parallelism.data_parallel: zero1, zero2 or zero3, which give each rank a share of it, with a "
                "data_parallel_replicate_degree lower than the number of ranks",
            )
        if self.gradients_leave:
            first = self.chosen[0]
            raise SpecError(
                f"offload.{first} works on one rank, here are {num_ranks}",
                fix=f"leave offload.{first} out; parallelism.data_parallel: zero2 divides gradients, zero3 parameters too",
            )
        return self


class Nvme(Host):
    """Optimizer state and float32 masters are in scratch files, read and written past the page cache beside the host's step. Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857."""

    paper: ClassVar[str] = "arXiv:2104.07857"
    to_files: ClassVar[bool] = True

    folder: Annotated[str, Circumstance()] = Field(
        "",
        description="Folder of the scratch files, on a local disk; empty: the stage's own, or the system's temporary one.",
    )

    host_bytes: Annotated[int, Circumstance()] = Field(
        0, ge=0, description="Bytes of them, of each rank, that stay in host memory."
    )

    parameters_on_disk: bool = Field(
        False, description="As parameters, with layers' weights in a scratch file instead of host memory."
    )

    @property
    def chosen(self) -> tuple[str, ...]:
        """As `Offload.chosen`."""
        return (*super().chosen, *(("parameters_on_disk",) if self.parameters_on_disk else ()))

    @property
    def streams(self) -> bool:
        """As `Host.streams`."""
        return self.parameters or self.parameters_on_disk

    @property
    def streams_files(self) -> bool:
        """As `Host.streams_files`."""
        return self.parameters_on_disk

    @property
    def memory_bytes(self) -> int:
        """As `host_bytes`."""
        return self.host_bytes

    @property
    def scratch(self) -> str:
        """As chosen, else the system's folder for temporary files."""
        return self.folder or tempfile.gettempdir()

    def within(self, folder: Path) -> Offload:
        """As `Offload.within`."""
        return self if self.folder else self.model_copy(update={"folder": str(folder)})


class Auto(Offload):
    """None if it fits, else the fastest of host and nvme, and of gradients and parameters there, that does: what is used most seldom leaves first. Rajbhandari et al. 2021, arXiv:2104.07857."""

    paper: ClassVar[str] = "arXiv:2104.07857"

    folder: str = Field("", description="Folder of the scratch files of nvme; empty: as there.")
    device_bytes: int | None = Field(
        None, gt=0, description="Memory of the device that the training may take; empty: what is free."
    )
    host_bytes: int | None = Field(
        None, gt=0, description="Memory of a GPU's host that it may take; empty: what is free."
    )

    @property
    def leaves(self) -> bool:
        """It may."""
        return True

    def candidates(self) -> list[Offload]:
        """What a plan chooses from, what is used most seldom leaving first. `none` works with every training, others not."""
        more: tuple[dict[str, bool], ...] = ({}, {"gradients": True}, {"parameters": True})
        found: list[Offload] = [Resident(kind="none")]
        found += [Host(kind="host", **one) for one in more]
        return found + [Nvme(kind="nvme", folder=self.folder, **one) for one in more]

    def ready(self, num_ranks: int, num_shards: int) -> Offload:
        """A plan chooses. Raises SpecError: none did."""
        raise SpecError(
            "offload auto is chosen by a training's plan, and there is none",
            fix="give a Trainer offload none, host or nvme",
        )


def scratch_of(offload: Offload) -> str | None:
    """The folder whose disk a stage's scratch files are on: that of its outputs unless one is set; None: there are no files."""
    return (offload.folder or ".") if isinstance(offload, Nvme) else None


def as_said(offload: Offload) -> str:
    """A technique with what differs from its defaults."""
    where = f" in {offload.folder}" if isinstance(offload, Nvme) and offload.folder else ""
    return f"{offload.kind}{where}" + (f" with {', '.join(offload.chosen)}" if offload.chosen else "")
