"""How many bytes of tensors a rank has at most while weights are made, read and written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hone.base.ranks import Mesh
from hone.model.config import ModelConfig
from hone.model.decoder import Drawn, unmade
from hone.model.hf import Checkpoint
from hone.train.loop import Trainer
from hone.train.parallelism import Parallelism
from hone.train.schedules.cosine import Cosine
from hone.train.start import Read

FILE_BYTES = 100_000
"""Of one file of a written model."""


class Alive(TorchDispatchMode):
    """Counts the bytes of what operations made while it was on, each until nothing holds it, gloo's threads included.

    (A profiler would not do: it does not see what other threads free, and at times gloo's thread is the last to hold a tensor.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[ReferenceType[UntypedStorage]] = []
        self._most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func`; a storage that it returns and did not get is a new one. What `resize_` did since the last call is seen."""
        result = func(*args, **(kwargs or {}))
        known = {id(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        made = [one.untyped_storage() for one in tree_leaves(result) if isinstance(one, Tensor) and not one.is_meta]
        self._storages += [
            ref(storage) for number, storage in {id(one): one for one in made}.items() if number not in known
        ]
        self._most = max(self._most, self._now())
        return result

    def _now(self) -> int:
        self._storages = [one for one in self._storages if one() is not None]
        return sum(one.nbytes() for one in (each() for each in self._storages) if one is not None)

    @contextmanager
    def counting(self, found: dict[str, int], name: str) -> Iterator[None]:
        """Stores by how much what it counts grew inside at most."""
        self._most = before = self._now()
        with self:
            yield
        found[name] = self._most - before


def most_alive(kinds: list[Any], config: dict[str, Any], tokenizer_from: str, out: str) -> list[dict[str, int]]:
    """For each kind of parallelism the most bytes of this rank where a model is drawn, written, and read again."""
    torch.set_num_threads(1)
    mesh, every = Mesh.from_environment(), []
    for number, kind in enumerate(kinds):
        found: dict[str, int] = {}
        folder = Path(out) / str(number)
        with mesh.together():
            shared, what = Parallelism.read(kind), ModelConfig.read(config)
            ranks = shared.ranks(mesh, "cpu")

            def trainer(model: Any, shared: Any = shared, ranks: Any = ranks) -> Trainer:
                return Trainer(shared.decoder(model, ranks, 32), steps=1, schedule=Cosine(), ranks=ranks)

            alive = Alive()
            with alive.counting(found, "drawn"):
                one = trainer(unmade(what, Drawn(what, "cpu", 0)))
            with alive.counting(found, "written"):
                shared.save(one, Path(tokenizer_from), "float32", folder, FILE_BYTES)
            mesh.gather(None)
            del one
            checkpoint = Checkpoint(folder)
            model = checkpoint.empty()  # maps all files, to read their headers
            checkpoint.close()
            with Alive().counting(found, "read"):
                model.maker = Read(checkpoint, "cpu", torch.float32)
                one = trainer(model)
            found["kept"] = sum(master.numel() * 4 for master in one.update.weights.masters.values())
            every.append(found)
    return every
