"""Child processes of test_ranks: every rank of a compression, one of which may be in trouble at a layer."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import torch

import hone.compress.allocations.kl
import hone.compress.structured.importance
import hone.cost.compress.compression
import hone.model.tokenizer  # noqa: F401
from hone.base.artifact import Artifact
from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.compress import shards, stream
from hone.compress.stage import Compress
from hone.model.feed_forwards import FEED_FORWARDS
from tests.ranked import together

FEED_FORWARDS.rows["top_experts"] = "tests.model.extensions.top_experts:TopExperts"  # in these processes alone
LAYER = 1
"""The layer at which a rank is in trouble."""


def compress(num_ranks: int, spec: dict, model: str, out: str, trouble: str = "", rank: int = 0) -> list:
    """[return code, what the rank says, standard error] of every rank; with one rank, in this process."""
    return [[*one] for one in together(num_ranks, _compress, spec, model, out, trouble, rank)]


def _compress(spec: dict, model: str, out: str, trouble: str, rank: int) -> str:
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    if trouble and mesh.rank == rank:
        _prepare(trouble, Path(f"{out}.partial") / "state" / f"layer-{LAYER - 1:05d}.json")
    try:
        made = Compress.read(spec).make(out, {"model": Artifact.read(model)}, Run(quiet=True, mesh=mesh))
    except HoneError as error:
        return f"{type(error).__name__}: {error.what}"
    return made.content


def _prepare(trouble: str, marker: Path) -> None:
    """Makes `trouble` for this rank: killed or failing before a layer, inputs that are not finite, no space for its shard.

    It is killed when there is the `marker` of the layer before, which a thread writes.
    """
    before, write = stream.Stream._compress_layer, shards.write_shard

    def compress_layer(self, index):
        if index == LAYER and trouble == "killed":
            while not marker.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if index == LAYER and trouble == "bug":
            raise ZeroDivisionError("a bug")
        if index == LAYER and trouble == "nan":
            self.flow.states[0, 0, 0] = float("nan")
        return before(self, index)

    def write_shard(path, tensors):
        if trouble == "full":
            with shards.full_disk_said(path):
                raise OSError(errno.ENOSPC, "no space left on device")
        write(path, tensors)

    stream.Stream._compress_layer, stream.write_shard = compress_layer, write_shard
