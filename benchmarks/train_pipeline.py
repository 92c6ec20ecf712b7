"""Pipeline schedules on several ranks: every schedule of hone beside torch.distributed.pipelining's around the same decoder.

    python -m benchmarks.train_pipeline [--ranks 2] [--rounds 3]              # gloo, the tiny shape, float32
    python -m benchmarks.train_pipeline --injected                            # the simulator against passes of known seconds
    python -m hone calibrate --device=cuda --nproc_per_node=2 && python -m benchmarks.train_pipeline --device=cuda    # two GPUs
    python -m benchmarks.train_pipeline --device=cuda --layers 12 --schedules zb_v gpipe --also-by-operations    # what the cut gains

One torchrun; the trainings take turns, `--steps` steps each a round, and the round with the least seconds counts. Two more
steps measure the bubble: the share of all ranks' time, until the last one's passes have ended, that is no pass of theirs (waits
for messages, and the time after a rank's last pass). On GPUs: 8 layers of Llama-3 8B in bf16, 6 micro-batches of a sequence of
8,192, the schedules of `ON_GPUS`, predicted from the rates that `hone calibrate` has stored. With `--injected` every pass sleeps a
given time instead of computing, so that the executor's order and waiting alone are measured; the result is the executor's
seconds against those that `simulate` says. Rows of the rounds so far are kept where a later one fails or `--seconds` are over.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # before torch: all forwards at once fill the card

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.ranks import forget, on_ranks
from benchmarks.sleeping import FORWARD, INPUTS, STEP, WEIGHTS, Sleeping, slow
from benchmarks.train import SHAPES, random_batch, random_decoder
from hone.base.ranks import Mesh
from hone.cost.pipeline.simulate import Costs, simulate
from hone.cost.train.cut import cut
from hone.cost.train.figures import growth_bytes, played, step_seconds
from hone.cost.train.pipeline import layer_seconds
from hone.cost.train.training import Training
from hone.feed.load import Batch
from hone.measure.machine import describe
from hone.model.context import Causal
from hone.model.decoder import Decoder
from hone.ops import linear_cross_entropy
from hone.parallel.pipeline.executor import Channels, Executor
from hone.parallel.pipeline.schedules import SCHEDULES
from hone.train import PIPELINE_SCHEDULES
from hone.train.activation_checkpointing import KeepAll
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.precision import TORCH_NAMES
from hone.train.schedules.cosine import Cosine

PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""torch's schedules with one stage a rank."""

BY_OPERATIONS = ", layers by operations"
"""Of a training whose stages are cut by operations, and not by the simulated seconds of a step."""

ON_GPUS = ("1f1b", "zb_v", "zb_h1", "interleaved", "dualpipe_v", "gpipe")
"""Those that need most memory last."""


class Found(NamedTuple):
    """What one round measured of a training, the most of all ranks."""

    seconds: float
    """Of a step."""
    loss: float
    """This rank's of the first step."""
    bubble: float
    """NaN of a peer."""
    peak_bytes: int
    """0 on CPUs."""
    rounds: int = 1

    def best(self, other: Found | None) -> Found:
        """Of this round and those before."""
        if other is None:
            return self
        seconds, bubble = min(self.seconds, other.seconds), min(self.bubble, other.bubble)
        return self._replace(seconds=seconds, bubble=bubble, rounds=other.rounds + 1)


def main() -> None:
    """Starts the ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    arguments = _arguments()
    on_ranks("train_pipeline", arguments, _injected if arguments.injected else _work)


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every training in turn; rank 0 writes the rows."""
    mesh = Mesh.from_environment()
    device = mesh.place(arguments.device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // mesh.world_size))
    shape, vocab = SHAPES[arguments.shape]
    changes = {"num_layers": arguments.layers, "tie_embeddings": False, "max_seq_len": arguments.seq_len}
    config = shape.model_copy(update=changes).config(vocab)
    batch = random_batch(np.random.default_rng(0), vocab, arguments.batch, arguments.seq_len)
    best: dict[str, Found] = {}
    names = arguments.schedules or [*PIPELINE_SCHEDULES, *PEERS.values()]
    if arguments.also_by_operations:
        cuts = {
            one: mesh.from_leader(lambda one=one: _cuts(one, config, arguments))
            for one in names
            if one not in PEERS.values()
        }
        names = [
            one for name in names for one in (name, *([name + BY_OPERATIONS] if len({*cuts.get(name, ())}) > 1 else []))
        ]
    begun = time.perf_counter()
    for number in range(1, arguments.rounds + 1):
        for name in list(names):
            if arguments.seconds and max(mesh.gather(time.perf_counter() - begun)) > arguments.seconds:
                names = []
                break
            try:
                with mesh.together():
                    found = _timed(name, config, mesh, device, arguments, batch)
            except Exception as error:  # one that fails must not cost the others
                names.remove(name)
                if mesh.leads:
                    print(f"{name}: left out, {type(error).__name__}: {str(error)[:300]}", flush=True)
                forget(error)
                continue
            best[name] = found.best(best.get(name))
            losses = mesh.gather({one: found.loss for one, found in best.items()})
            if mesh.leads:
                rows = {row["figure"].rpartition(": ")[2]: row for row in _rows(best, losses, config, arguments)}
                arguments.out.write_text(json.dumps([*rows.values()]))
                said = rows[name]["note"] if name in rows else f"{best[name].seconds:.4g} s a step"
                print(f"round {number}, {time.perf_counter() - begun:.0f} s: {name}: {said}", flush=True)


def _timed(name: str, config: Any, mesh: Mesh, device: str, arguments: argparse.Namespace, batch: Batch) -> Found:
    """One round of a training, from its model on."""
    on_gpu = device.startswith("cuda")
    trainer, step = _made(name, config, mesh, device, arguments, batch)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    loss = step()  # the optimizer's state, and the first transfers
    step()
    _meet(mesh, device)
    started = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    _synchronize(device)
    seconds = max(mesh.gather(time.perf_counter() - started)) / arguments.steps
    bubble = float("nan") if trainer is None else _bubble(trainer, step, mesh, device)
    peak = max(mesh.gather(torch.cuda.max_memory_allocated() if on_gpu else 0))
    del trainer, step
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Found(seconds, loss, bubble, peak)


def _bubble(trainer: Trainer, step: Callable[[], float], mesh: Mesh, device: str) -> float:
    """The share of all ranks' time in the passes of a step that is not spent in passes."""
    pipeline, found = trainer.ranks.pipeline, []
    assert pipeline is not None
    train = pipeline.train

    def watched(*given: Any) -> Any:
        _meet(mesh, device)
        mesh.waits.later()
        started = time.perf_counter()
        made = train(*given)
        _synchronize(device)
        found.append((time.perf_counter() - started, mesh.waits.later()()))
        return made

    pipeline.train = watched  # type: ignore[method-assign]
    for _ in range(2):
        step()
    pipeline.train = train  # type: ignore[method-assign]
    shares = []
    for took in zip(*mesh.gather(found), strict=True):
        busy = sum(seconds - waited for seconds, waited in took)
        shares.append(1 - busy / (len(took) * max(seconds for seconds, _ in took)))
    return min(shares)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _meet(mesh: Mesh, device: str) -> None:
    _synchronize(device)
    mesh.gather(None)


def _parallelism(name: str, num_ranks: int) -> Parallelism:
    schedule = PIPELINE_SCHEDULES.read(name.removesuffix(BY_OPERATIONS))
    return Parallelism(
        pipeline_parallel_degree=num_ranks, pipeline_parallel_schedule=schedule, pipeline_parallel_timeout_s=90
    )


def _planned(name: str, config: Any, arguments: argparse.Namespace) -> Training:
    """The step of a schedule as `hone train` plans it, with the layers that each stage has."""
    dtype, device, tokens = TORCH_NAMES[arguments.precision], arguments.device, arguments.batch * arguments.seq_len
    machine = describe(device).model_copy(update={"num_ranks": arguments.ranks})
    sizes = {"tokens": tokens // arguments.micro_batches, "seq_len": arguments.seq_len, "dtype": dtype}
    timed = partial(layer_seconds, machine=machine, **sizes)
    shared = _parallelism(name, arguments.ranks).shared(
        config, lambda part: AdamW().cost(part, dtype, device), arguments.micro_batches, arguments.seq_len,
        *(() if name.endswith(BY_OPERATIONS) else (timed,)),
    )  # fmt: skip
    work = Training(
        config.dims(), 1, arguments.batch, arguments.seq_len, dtype, KeepAll().segments(config.num_layers), shared.update,
        gradient_accumulation_steps=arguments.micro_batches, packed=False, pipeline=shared.pipeline,
    )  # fmt: skip
    return work if name.endswith(BY_OPERATIONS) else cut(work, machine)


def _layers(work: Training) -> list[range]:
    assert work.pipeline is not None
    return list(work.pipeline.layers)


def _cuts(name: str, config: Any, arguments: argparse.Namespace) -> list[tuple[range, ...]]:
    """The layers of each stage as planned and by operations."""
    return [tuple(_layers(_planned(one, config, arguments))) for one in (name, name + BY_OPERATIONS)]


def _made(
    name: str, config: Any, mesh: Mesh, device: str, arguments: argparse.Namespace, batch: Batch
) -> tuple[Trainer | None, Callable[[], float]]:
    """A training from random weights, None of a peer, and what does one step of it and says its loss (torch's: on the last rank)."""
    if name in PEERS.values():
        return None, _peer(name, random_decoder(config, device), mesh, arguments, batch)
    layers = mesh.from_leader(lambda: _layers(_planned(name, config, arguments)))
    shared = _parallelism(name, mesh.world_size)
    ranks = shared.ranks(mesh, device)
    trainer = shared.trainer()(
        shared.decoder(random_decoder(config, device), ranks, arguments.seq_len, layers), steps=1000, schedule=Cosine(warmup=2), optimizer=AdamW(),
        gradient_accumulation_steps=arguments.micro_batches, ranks=ranks, precision=arguments.precision,
        max_grad_norm=1.0 if shared.pipeline_parallel_schedule.exact else 0.0, compile=arguments.compile,
    )  # fmt: skip
    return trainer, lambda: trainer.step(batch).loss


class Stage(nn.Module):
    """A rank's layers, as a module that torch's stages take."""

    def __init__(self, decoder: Decoder, rank: int, size: int) -> None:
        super().__init__()
        each = len(decoder.layers) // size
        self.layers = nn.ModuleList(decoder.layers[rank * each : (rank + 1) * each])
        self.embedding = decoder.embed_tokens if rank == 0 else None
        self.norm, self.head = (decoder.norm, decoder.lm_head) if rank == size - 1 else (None, None)
        self.config = decoder.config

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states -> hidden states, of the last rank normed."""
        context = Causal(x if self.embedding is not None else x[..., 0])
        x = x if self.embedding is None else self.embedding(x)
        for spec in self.config.layers:
            spec.mixer.prepare(context, x)
        for layer in self.layers:
            x = layer(x, context)
        return x if self.norm is None else self.norm(x)


def _peer(name: str, model: Decoder, mesh: Mesh, arguments: argparse.Namespace, batch: Batch) -> Callable[[], float]:
    """One step of torch's own pipeline, with its AdamW and each rank's own clipping."""
    from torch.distributed import pipelining

    rank, size = mesh.rank, mesh.world_size
    part = Stage(model, rank, size)
    stage = pipelining.PipelineStage(part, rank, size, torch.device("cpu"))

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x, part.head.weight, targets)

    schedule = getattr(pipelining, name)(stage, arguments.micro_batches, loss_fn=loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)

    def step() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens, target=targets, losses=losses) if size == 1 else schedule.step(tokens)
        elif rank == size - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(one.item() for one in losses) / max(len(losses), 1))

    return step


def _rows(best: dict[str, Found], losses: list[dict[str, float]], config: Any, arguments: argparse.Namespace) -> list:
    """A row for the rate of every schedule, beside torch's where it has it."""
    dtype, device = TORCH_NAMES[arguments.precision], arguments.device
    machine = describe(device).model_copy(update={"num_ranks": arguments.ranks})
    bound = machine.calibration is None or dtype not in machine.calibration.dtypes
    base = "naive" if "naive" in best else next(iter(best), "")
    tokens = arguments.batch * arguments.seq_len
    rows = []
    for name in (one for one in best if one not in PEERS.values()):
        work = _planned(name, config, arguments)
        predicted = step_seconds(work, machine).value
        what = f"{arguments.shape}, {arguments.layers} layers on {arguments.ranks} {arguments.device} pipeline ranks, {arguments.precision}{', compiled' * arguments.compile}, {arguments.micro_batches} micro-batches of {arguments.batch // arguments.micro_batches} x {arguments.seq_len}"
        assert work.pipeline is not None
        idle = played(work, work.pipeline, machine).bubble
        found = best[name]
        row: dict[str, Any] = {
            "figure": f"{what}: {name}",
            "value": tokens / found.seconds,
            "unit": "tokens/s",
            "n": found.rounds,
        }
        row |= {"technique": f"pipeline schedule/{name.removesuffix(BY_OPERATIONS)}", "predicted": tokens / predicted}
        row |= {
            "note": f"{found.seconds:.4g} s a step, predicted {predicted:.4g} s ({predicted / found.seconds:.3f}); bubble "
            f"{found.bubble:.1%}, predicted {idle:.1%}; {found.seconds / best[base].seconds:.3f} of {base}'s seconds"
        }
        if found.peak_bytes:
            grown = growth_bytes(work, device).value
            row |= {"peak_bytes": found.peak_bytes, "predicted_peak_bytes": grown}
            row["note"] += f"; {found.peak_bytes / 2**30:.1f} GiB, predicted {grown / 2**30:.1f}"
        row["note"] += f"; layers {' '.join(str(len(one)) for one in work.pipeline.layers)}"
        row["note"] += ", bounds without calibration" * bound
        peer = PEERS.get(name)
        if peer in best:
            row |= {"peer": f"torch {peer}", "peer_value": tokens / best[peer].seconds}
            row["ratio"] = best[peer].seconds / found.seconds
            row["note"] += f"; first losses {losses[0][name]:.6f}, torch's {losses[-1][peer]:.6f}"
        rows.append(row)
    return rows


def _injected(arguments: argparse.Namespace) -> None:
    """Every schedule with passes that sleep: seconds of a run on the clock of all ranks against the simulated ones."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    size, rows = mesh.world_size, []
    with mesh.together():
        channels = Channels(mesh, [range(size)], "cpu")
        for name in arguments.schedules or PIPELINE_SCHEDULES:
            table = SCHEDULES[name](size, 2 * size)
            stages = {stage: Sleeping() for stage in table.held(mesh.rank)}
            last = table.stages - 1

            def passes(stage: int, number: int, x: Tensor | None, stages=stages, last=last) -> Any:
                y = stages[stage](torch.zeros(4, 8) if x is None else x)
                return (None, y.sum()) if stage == last else (y, None)

            step = lambda _: time.sleep(STEP)  # noqa: E731
            executor = Executor(table, channels, stages, passes, linears=[], step=step)
            executor.weights.compute = slow(executor.weights.compute)  # type: ignore[method-assign]
            for one in stages.values():
                one.deferred = lambda executor=executor: executor.weights.deferring  # type: ignore[method-assign]
            seconds = []
            for _ in range(arguments.rounds):
                mesh.gather(None)
                started = time.perf_counter()
                executor.run(torch.empty(4, 8))
                seconds.append(max(mesh.gather(time.perf_counter() - started)))
            said = simulate(table, Costs(FORWARD, INPUTS, WEIGHTS, step=STEP)).seconds
            if mesh.leads:
                found = sorted(seconds)[len(seconds) // 2]
                rows.append({
                    "figure": f"executor of {name} with passes of {FORWARD}, {INPUTS}, {WEIGHTS} s on {size} ranks, {2 * size} micro-batches",
                    "value": found, "unit": "s", "n": arguments.rounds, "technique": f"pipeline schedule/{name}",
                    "ratio": found / said, "peer": "simulated", "peer_value": said,
                })  # fmt: skip
    if mesh.leads:
        arguments.out.write_text(json.dumps(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--schedules", nargs="+", choices=[*PIPELINE_SCHEDULES, *PEERS.values()])
    parser.add_argument("--shape", choices=SHAPES, help="tiny; on GPUs llama3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, help="sequences of a step: 16; on GPUs as many as micro-batches")
    parser.add_argument("--micro-batches", type=int, help="8; on GPUs 6")
    parser.add_argument("--seq-len", type=int, help="256; on GPUs 8192")
    parser.add_argument("--precision", help="fp32; on GPUs bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0, help="no training begins later than that; 0: all do")
    parser.add_argument(
        "--also-by-operations",
        action="store_true",
        help="each schedule also with its layers divided by operations, where that differs",
    )
    parser.add_argument("--injected", action="store_true")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    on_gpus = given.device == "cuda"
    if on_gpus and (given.injected or {*PEERS.values()} & {*(given.schedules or ())}):
        parser.error("--injected and torch's schedules are timed on CPUs alone")
    given.shape = given.shape or ("llama3-8b" if on_gpus else "tiny")
    given.micro_batches = given.micro_batches or (6 if on_gpus else 8)
    given.batch = given.batch or (given.micro_batches if on_gpus else 16)
    given.seq_len = given.seq_len or (8192 if on_gpus else 256)
    given.precision = given.precision or ("bf16" if on_gpus else "fp32")
    given.schedules = given.schedules or (list(ON_GPUS) if on_gpus else None)
    return given


if __name__ == "__main__":
    main()
