"""What the benchmarks of several ranks share: their start under torchrun, and torch's own data parallelism as the peer."""

from __future__ import annotations

import argparse
import gc
import json
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import ledger
from hone.feed.load import Batch
from hone.model.context import Causal
from hone.model.decoder import Decoder
from hone.ops import linear_cross_entropy


def on_ranks(
    module: str, arguments: argparse.Namespace, work: Callable[[argparse.Namespace], Any], ledger_name: str = "train"
) -> None:
    """Starts `arguments.ranks` ranks of `benchmarks.MODULE`, prints their table and adds it to the ledger.

    In a rank, where `arguments.out` says where rank 0 writes the rows, it calls `work`. Rows that were written before a rank
    failed, or before this process was asked to end, count: then the ranks are ended and the exit status is theirs.
    """
    if arguments.out is not None:
        work(arguments)
        return
    rows, code = rows_of(module, arguments.ranks, sys.argv[1:])
    if rows:
        print(ledger.table(rows), flush=True)
    if rows and not getattr(arguments, "no_ledger", False):
        stamp = ledger.stamp_of(getattr(arguments, "device", "cpu"), arguments.ranks)
        print(ledger.append(ledger_name, rows, stamp=stamp))
    if code:
        raise SystemExit(f"benchmarks.{module}: the ranks ended with status {code} after {len(rows)} rows")


def rows_of(module: str, ranks: int, given: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The rows that rank 0 of `benchmarks.MODULE` wrote, and the exit status of its `ranks` ranks; `given` is their command line."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        code = _ended([*command, "-m", f"benchmarks.{module}", *given, f"--out={out}"])
        return (json.loads(out.read_text()) if out.exists() else []), code


def _ended(command: list[str]) -> int:
    """The exit status of torchrun's `command`; a SIGTERM to this process ends it first, and it its ranks."""
    process = subprocess.Popen(command, stdout=sys.stderr)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            process.wait()


def forget(error: BaseException | None) -> None:
    """Frees what the frames that `error` passed through, and those of the errors before it, still hold: models, and a GPU's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Loss(nn.Module):
    """The mean loss of a decoder, as a module that torch's wrappers take."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.decoder.hidden(tokens, Causal(tokens))
        return linear_cross_entropy(self.decoder.head_input(x), self.decoder.head_weight, targets)


def torch_step(
    kind: Literal["ddp", "fsdp2"], model: Decoder, device: str, dtype: torch.dtype, *, compile: bool
) -> Callable[[Batch], float]:
    """A step of torch's DDP or FSDP2 around `model`, with its fused AdamW and clipping; its result is the loss.

    The default group is gloo's, over which tensors on GPUs would travel through the host: they get a group of NCCL.
    """
    kind_of_device = device.partition(":")[0]
    group = dist.new_group(backend="nccl") if kind_of_device == "cuda" else dist.group.WORLD
    for layer in model.layers if compile else ():
        layer.compile(dynamic=False)
    whole: nn.Module = Loss(model)
    if kind == "ddp":
        whole = nn.parallel.DistributedDataParallel(whole.to(dtype), gradient_as_bucket_view=True, process_group=group)
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        grid = DeviceMesh.from_group(group, kind_of_device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=grid, mp_policy=policy)
        fully_shard(whole, mesh=grid, mp_policy=policy)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-4, fused=kind_of_device == "cuda", foreach=None)

    def step(batch: Batch) -> float:
        tokens, targets = (torch.from_numpy(array).to(device) for array in (batch.tokens, batch.targets))
        loss = whole(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
