"""Data-parallel training on several ranks: every technique beside torch's DDP, FSDP2 and DataParallel around the same decoder, in one run.

    python -m benchmarks.train_ranks [--ranks 2] [--rounds 3]                       # gloo, the small shape, float32
    python -m benchmarks.train_ranks --device cuda --ranks 4 --shape llama3-8b --batch 2 --seq-len 8192 --precision bf16

    OMP_NUM_THREADS=1 python -m benchmarks.train_ranks --shape 27m --batch 4 --seq-len 512 --only ddp    # and --ranks 1 --only zero1: one process
    python -m benchmarks.train_ranks --only ddp threads                             # one process with threads beside a process a replica

One torchrun; the trainings take turns, `--steps` steps each a round, and the round with the least seconds counts. Memory is
what rank 0's weights, optimizer state and gradients take between two steps and at the peak (GPUs only), beside the estimate. `threads` is
torch.nn.DataParallel: rank 0 trains alone, with a replica a device (on a CPU: a thread), on the batches of all ranks.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.ranks import Loss, on_ranks, torch_step
from benchmarks.train import SHAPES
from hone.base.ranks import Mesh
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.training import Training
from hone.feed.load import Batch
from hone.measure.machine import describe
from hone.model.decoder import Decoder, Drawn, build, unmade
from hone.train import DATA_PARALLEL
from hone.train.activation_checkpointing import KeepAll
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.precision import TORCH_NAMES
from hone.train.schedules.cosine import Cosine

VARIANTS: dict[str, Any] = {"zero3, weights stay": {"kind": "zero3", "reshard_after_forward": "never"}}
"""Techniques with other options than their defaults, by what the row calls them."""

THREADS = "threads"
PEERS = {"ddp": "torch DDP", "zero3": "torch FSDP2", THREADS: "ddp"}


def main() -> None:
    """Starts the ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    on_ranks("train_ranks", _arguments(), _work)


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every training in turn; rank 0 writes the rows."""
    mesh = Mesh.from_environment()
    device = mesh.place(arguments.device)
    if arguments.device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads()))
    shape, vocab = SHAPES[arguments.shape]
    drawn = np.random.default_rng(mesh.rank)
    tokens = drawn.integers(0, vocab, (arguments.batch, arguments.seq_len + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.zeros((arguments.batch, arguments.seq_len), np.int32))
    took: dict[str, list[float]] = {}
    peak: dict[str, int] = {}
    with mesh.together():
        for number in range(arguments.rounds):
            for name in _names(arguments):
                step = _made(name, shape.config(vocab), mesh, device, arguments, batch)
                step()  # the optimizer's state, and the first transfers
                mesh.gather(None)
                started = time.perf_counter()
                for _ in range(arguments.steps):
                    step()
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                    peak[name] = torch.cuda.max_memory_allocated()
                seconds = max(mesh.gather(time.perf_counter() - started)) / arguments.steps
                took.setdefault(name, []).append(seconds)
                del step
                if device.startswith("cuda"):
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
            if mesh.leads:
                print(f"round {number + 1}: { ({name: min(times) for name, times in took.items()}) }", flush=True)
        rows = _rows(took, peak, shape.config(vocab).dims(), arguments) if mesh.leads else []
    if mesh.leads:
        arguments.out.write_text(json.dumps(rows))


def _made(
    name: str, config: Any, mesh: Mesh, device: str, arguments: argparse.Namespace, batch: Batch
) -> Callable[[], Any]:
    """A training from random weights; the result does one step of it."""
    if name in DATA_PARALLEL or name in VARIANTS:
        shared = Parallelism(data_parallel=_technique(name, mesh.world_size))
        ranks = shared.ranks(mesh, device)
        alone = mesh.world_size == 1
        model = build(config, device=device) if alone else unmade(config, Drawn(config, device, 0))
        trainer = shared.data_parallel.trainer()(
            model, steps=1000, schedule=Cosine(warmup=2), optimizer=AdamW(), precision=arguments.precision, ranks=ranks,
            compile=arguments.compile,
        )  # fmt: skip
        return lambda: trainer.step(batch)
    whole = build(config, device=device)
    if name == THREADS:
        return _threads(whole, device, arguments, batch) if mesh.leads else lambda: None
    dtype = getattr(torch, TORCH_NAMES[arguments.precision])
    step = torch_step("ddp" if name == PEERS["ddp"] else "fsdp2", whole, device, dtype, compile=arguments.compile)
    return lambda: step(batch)


def _names(arguments: argparse.Namespace) -> list[str]:
    """What takes turns: with `--only` these, and what each of them is compared with."""
    every = dict.fromkeys([*DATA_PARALLEL, *VARIANTS, *PEERS.values(), THREADS])
    only = arguments.only or every
    return [name for name in every if name in only or name in [PEERS.get(one) for one in only]]


def _technique(name: str, num_ranks: int) -> Any:
    """The technique `name` with its defaults; where its result depends on the ranks, for as many as there are."""
    if name in VARIANTS:
        return DATA_PARALLEL.read(VARIANTS[name])
    lossy = {} if DATA_PARALLEL[name].exact else {"num_workers": num_ranks}
    return DATA_PARALLEL.read({"kind": name, **lossy})


def _threads(model: Decoder, device: str, arguments: argparse.Namespace, batch: Batch) -> Callable[[], Any]:
    """One step of single-process data parallelism, of the batches of all ranks: weights are copied to the replicas, each of which computes its
    part in a thread, and gradients are added up on the first device.

    On GPUs it is torch's class. On a CPU that has one device and does nothing, so its four parts are here, each thread with its own backward
    pass: autograd has one thread a device.
    """
    dtype, count = getattr(torch, TORCH_NAMES[arguments.precision]), arguments.ranks
    master = Loss(model).to(dtype)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3, fused=device.startswith("cuda"), foreach=None)
    tokens, targets = (torch.from_numpy(array).to(device).repeat(count, 1) for array in (batch.tokens, batch.targets))
    if device.startswith("cuda"):
        whole = nn.DataParallel(master, device_ids=list(range(count)))

        def gradients() -> None:
            whole(tokens, targets).mean().backward()
    else:
        replicas = [copy.deepcopy(master) for _ in range(count)]
        pool = ThreadPoolExecutor(count)
        parts = list(zip(replicas, tokens.chunk(count), targets.chunk(count), strict=True))

        def one(part: tuple[nn.Module, Tensor, Tensor]) -> None:
            replica, mine, wanted = part
            with torch.no_grad():
                for own, whole in zip(replica.parameters(), master.parameters(), strict=True):
                    own.copy_(whole)
            replica.zero_grad()
            replica(mine, wanted).backward()

        def gradients() -> None:
            list(pool.map(one, parts))
            every = [list(replica.parameters()) for replica in replicas]
            for whole, *copies in zip(master.parameters(), *every, strict=True):
                whole.grad = torch.stack([one.grad for one in copies if one.grad is not None]).mean(0)

    def step() -> None:
        gradients()
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _rows(took: dict[str, list[float]], peak: dict[str, int], dims: Any, arguments: argparse.Namespace) -> list[dict]:
    """A row for the rate of every technique, beside torch's where it has it, and on GPUs one for its peak memory."""
    best = {name: min(times) for name, times in took.items()}
    rows, machine = [], describe(arguments.device).model_copy(update={"num_ranks": arguments.ranks})
    tokens = arguments.ranks * arguments.batch * arguments.seq_len
    what = f"{arguments.shape} on {arguments.ranks} ranks, {arguments.precision}, {arguments.batch} x {arguments.seq_len} each"
    what += ", compiled" if arguments.compile else ""
    for name in [one for one in (*DATA_PARALLEL, *VARIANTS) if one in (arguments.only or best)]:
        technique = _technique(name, arguments.ranks)
        divided = Parallelism(data_parallel=technique).divided(arguments.ranks)
        work = Training(
            dims, 1, arguments.ranks * arguments.batch, arguments.seq_len, TORCH_NAMES[arguments.precision],
            KeepAll().segments(dims.num_layers), AdamW().cost(dims, "float32", arguments.device), packed=False,
            divided=divided,
        )  # fmt: skip
        predicted, grown = step_seconds(work, machine), growth_bytes(work, arguments.device).value
        peer = PEERS.get(technique.kind)
        row = {"figure": f"{what}: {name}", "value": tokens / best[name], "unit": "tokens/s", "n": arguments.rounds}
        row |= {"technique": f"data parallelism/{technique.kind}"}
        row |= {
            "note": f"{best[name]:.4g} s a step, predicted {predicted.value:.4g} s; memory predicted {grown:.4g} B; load {os.getloadavg()[0]:.1f}"
        }
        if peer:
            row |= {"peer": peer, "peer_value": tokens / best[peer], "ratio": best[peer] / best[name]}
        rows.append(row)
        if name in peak:
            more = {"peer": peer, "peer_value": peak[peer] / 2**30, "ratio": peak[name] / peak[peer]} if peer else {}
            note = f"predicted {grown / 2**30:.4g} GiB"
            rows.append(
                {
                    "figure": f"{what}: {name}, peak memory",
                    "value": peak[name] / 2**30,
                    "unit": "GiB",
                    "n": 1,
                    "note": note,
                    **more,
                }
            )
    if THREADS in best:
        ratios = [other / own for other, own in zip(took["ddp"], took[THREADS], strict=True)]
        note = f"medians of the rounds, the ratio of those side by side ({min(ratios):.2f} to {max(ratios):.2f}); load {os.getloadavg()[0]:.1f}"
        row = {"figure": f"{what}: one process, a thread a replica (DataParallel)", "unit": "tokens/s", "note": note}
        row |= {"value": tokens / statistics.median(took[THREADS]), "n": arguments.rounds}
        row |= {
            "peer": "ddp",
            "peer_value": tokens / statistics.median(took["ddp"]),
            "ratio": statistics.median(ratios),
        }
        rows.append(row)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=8, help="sequences of one rank")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile the layers, of torch's forms too")
    parser.add_argument("--only", nargs="+", help="techniques that are measured, and 'threads'; all without it")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
