"""Mesh: the processes that run one stage together; one by default, those of torchrun under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from hone.base.errors import HoneError, MachineError

T = TypeVar("T")

_PATIENCE = timedelta(days=30)
"""How long a rank waits for rank 0's work: a training may take weeks."""


@dataclass
class Mesh:
    """This process's `rank` among `world_size`, and its `local_rank` on this machine, all as torchrun counts them."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    _group: Any = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Mesh:
        """The mesh that torchrun describes by RANK, LOCAL_RANK and WORLD_SIZE; one process without them.

        Raises MachineError when they are invalid.
        """
        said = {name: environment.get(name.upper()) for name in ("rank", "local_rank", "world_size")}
        if said["rank"] is None or said["world_size"] is None:
            return cls()
        try:
            mesh = cls(**{name: int(value) for name, value in said.items() if value is not None})
        except ValueError:
            mesh = cls(-1)
        if not 0 <= mesh.rank < mesh.world_size:
            shown = ", ".join(f"{name.upper()}={value}" for name, value in said.items())
            raise MachineError(f"the environment says {shown}", fix="start it with torchrun, or unset these variables")
        return mesh

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes artifacts and messages."""
        return self.rank == 0

    def from_leader(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by rank 0 alone, on every rank; the others wait. Results must be picklable.

        Every rank must call it, in the same order. Raises what `work` raises: a HoneError on every rank, any other error on
        rank 0 and a MachineError that names it on the others, so that no rank waits for a dead one.
        """
        if self.world_size == 1:
            return work()
        self._connect()  # before the work, so that a rank that dies meanwhile is noticed
        if not self.leads:
            result, error = self._broadcast(None)
            if error is not None:
                raise error
            return result
        try:
            result = work()
        except HoneError as error:
            self._broadcast((None, error))
            raise
        except Exception as error:
            told = MachineError(f"rank 0 failed: {type(error).__name__}: {error}", fix="see what rank 0 printed")
            self._broadcast((None, told))
            raise
        self._broadcast((result, None))
        return result

    def _connect(self) -> None:
        """Joins all ranks in a gloo group, once."""
        import torch.distributed as dist

        if self._group is None:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def _broadcast(self, value: Any) -> Any:
        """Rank 0's `value` on every rank. Raises MachineError when a rank has died."""
        import torch.distributed as dist

        values = [value]
        try:
            dist.broadcast_object_list(values, src=0, group=self._group)
        except RuntimeError as error:
            raise MachineError(
                f"rank {self.rank} lost the other ranks: {str(error).splitlines()[0]}",
                fix="see what the rank that ended first printed, and start all of them again; the stage resumes",
            ) from None
        return values[0]
