"""What rank 0 tells a worker to build. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from hone.parallel.place import Place
from hone.serve.spec import EngineSpec


@dataclass(frozen=True)
class WorkerOrder:
    """What a worker builds. `spec` has its sizes filled in; `port` is that of rank 0's store for torch.distributed."""

    place: Place
    folder: str
    spec: EngineSpec
    device: str
    port: int
