"""How many bytes of tensors a rank has at most while weights are made, read and written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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


@contextmanager
def counting(found: dict[str, int], name: str) -> Iterator[None]:
    """Stores the most bytes that tensors had at once inside, without those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield
    waiting, events = list(seen.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        one = waiting.pop()
        waiting += one.children
        if hasattr(one.extra_fields, "alloc_size"):
            events.append((one.start_time_ns, one.extra_fields))
    events.sort(key=lambda one: one[0])
    now, most = 0, 0
    for _, one in events:
        now += one.alloc_size
        most = max(most, now)
    # The first does not see what gloo's threads free, the second not what was freed while nobody counted: neither is too small.
    before = events[0][1].total_allocated - events[0][1].alloc_size if events else 0
    found[name] = min(most, max((one.total_allocated for _, one in events), default=0) - before)


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

            with counting(found, "drawn"):
                one = trainer(unmade(what, Drawn(what, "cpu", 0)))
            with counting(found, "written"):
                shared.save(one, Path(tokenizer_from), "float32", folder, FILE_BYTES)
            mesh.gather(None)
            del one
            checkpoint = Checkpoint(folder)
            model = checkpoint.empty()  # maps all files, to read their headers
            checkpoint.close()
            with counting(found, "read"):
                model.maker = Read(checkpoint, "cpu")
                one = trainer(model)
            found["kept"] = sum(master.numel() * 4 for master in one.update.weights.masters.values())
            every.append(found)
    return every
