"""Pipeline schedules on several ranks: every schedule of hone beside torch.distributed.pipelining's around the same decoder.

    python -m benchmarks.train_pipeline [--ranks 2] [--rounds 3]              # gloo, the tiny shape, float32
    python -m benchmarks.train_pipeline --injected                            # the simulator against passes of known seconds

One torchrun; the trainings take turns, `--steps` steps each a round, and the round with the least seconds counts. With
`--injected` every pass sleeps a given time instead of computing, so that the executor's order and waiting alone are
measured; the result is the executor's seconds against those that `simulate` says.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.ranks import on_ranks
from benchmarks.train import SHAPES
from hone.base.ranks import Mesh
from hone.data.load import Batch
from hone.measure.machine import describe
from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.ops import linear_cross_entropy
from hone.parallel.pipeline.executor import Channels, Executor
from hone.parallel.pipeline.schedules import SCHEDULES
from hone.parallel.pipeline.simulate import Costs, simulate
from hone.train import PIPELINE_SCHEDULES
from hone.train.activation_checkpointing import KeepAll
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.schedules.cosine import Cosine
from hone.train.work import Work, step_seconds

PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""torch's schedules with one stage a rank."""

FORWARD, INPUTS, WEIGHTS = 0.020, 0.024, 0.016
"""Seconds of a sleeping pass."""


def main() -> None:
    """Starts the ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    arguments = _arguments()
    on_ranks("train_pipeline", arguments, _injected if arguments.injected else _work)


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every training in turn; rank 0 writes the rows."""
    mesh = Mesh.from_environment()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // mesh.world_size))
    shape, vocab = SHAPES[arguments.shape]
    config = shape.model_copy(update={"num_layers": arguments.layers, "tie_embeddings": False}).config(vocab)
    tokens = np.random.default_rng(0).integers(0, vocab, (arguments.batch, arguments.seq_len + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.zeros((arguments.batch, arguments.seq_len), np.int32))
    best: dict[str, float] = {}
    last: dict[str, float] = {}
    with mesh.together():
        for number in range(arguments.rounds):
            for name in [*PIPELINE_SCHEDULES, *PEERS.values()]:
                step = _made(name, config, mesh, arguments, batch)
                last[name] = step()  # the optimizer's state, and the first transfers
                mesh.gather(None)
                started = time.perf_counter()
                for _ in range(arguments.steps):
                    step()
                seconds = max(mesh.gather(time.perf_counter() - started)) / arguments.steps
                best[name] = min(best.get(name, seconds), seconds)
                del step
            if mesh.leads:
                print(f"round {number + 1}: {best}", flush=True)
        losses = mesh.gather(last)
        rows = _rows(best, losses, config, arguments) if mesh.leads else []
    if mesh.leads:
        arguments.out.write_text(json.dumps(rows))


def _made(name: str, config: Any, mesh: Mesh, arguments: argparse.Namespace, batch: Batch) -> Callable[[], float]:
    """A training from random weights; the result does one step of it and says its loss (torch's: on the last rank)."""
    model = build(config)
    if name not in PIPELINE_SCHEDULES:
        return _peer(name, model, mesh, arguments, batch)
    shared = Parallelism(
        pipeline_parallel_degree=mesh.world_size, pipeline_parallel_schedule=PIPELINE_SCHEDULES.read(name)
    )
    ranks = shared.ranks(mesh, "cpu")
    trainer = Trainer(
        shared.decoder(model, ranks, arguments.seq_len), steps=1000, schedule=Cosine(warmup=2), optimizer=AdamW(),
        gradient_accumulation_steps=arguments.micro_batches, ranks=ranks,
    )  # fmt: skip
    return lambda: trainer.step(batch).loss


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


def _rows(best: dict[str, float], losses: list[dict[str, float]], config: Any, arguments: argparse.Namespace) -> list:
    """A row for the rate of every schedule, beside torch's where it has it."""
    machine = describe("cpu").model_copy(update={"num_ranks": arguments.ranks})
    tokens, facts = arguments.batch * arguments.seq_len, config.facts()
    rows = []
    for name in PIPELINE_SCHEDULES:
        shared = Parallelism(
            pipeline_parallel_degree=arguments.ranks, pipeline_parallel_schedule=PIPELINE_SCHEDULES.read(name)
        ).shared(config, lambda part: AdamW().cost(part, "float32", "cpu"), arguments.micro_batches, arguments.seq_len)
        work = Work(
            facts, 1, arguments.batch, arguments.seq_len, "float32", KeepAll().segments(facts.num_layers), shared.update,
            gradient_accumulation_steps=arguments.micro_batches, packed=False, pipeline=shared.pipeline,
        )  # fmt: skip
        predicted = step_seconds(work, machine).value
        what = f"{arguments.shape}, {arguments.layers} layers on {arguments.ranks} pipeline ranks, {arguments.micro_batches} micro-batches of {arguments.batch // arguments.micro_batches} x {arguments.seq_len}"
        row = {"figure": f"{what}: {name}", "value": tokens / best[name], "unit": "tokens/s", "n": arguments.rounds}
        row |= {"technique": f"pipeline schedule/{name}"}
        row |= {
            "note": f"{best[name]:.4g} s a step, predicted {predicted:.4g} s; {best[name] / best['naive']:.3f} of naive's"
        }
        peer = PEERS.get(name)
        if peer:
            row |= {"peer": f"torch {peer}", "peer_value": tokens / best[peer], "ratio": best[peer] / best[name]}
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
        for name in PIPELINE_SCHEDULES:
            table = SCHEDULES[name](size, 2 * size)
            stages = {stage: _Sleeping() for stage in table.held(mesh.rank)}
            last = table.stages - 1

            def passes(stage: int, number: int, x: Tensor | None, stages=stages, last=last) -> Any:
                y = stages[stage](torch.zeros(4, 8) if x is None else x)
                return (None, y.sum()) if stage == last else (y, None)

            executor = Executor(table, channels, stages, passes, linears=[])
            executor.weights.compute = _slow(executor.weights.compute)  # type: ignore[method-assign]
            for one in stages.values():
                one.deferred = lambda executor=executor: executor.weights.deferring  # type: ignore[method-assign]
            seconds = []
            for _ in range(arguments.rounds):
                mesh.gather(None)
                started = time.perf_counter()
                executor.run(torch.empty(4, 8))
                seconds.append(max(mesh.gather(time.perf_counter() - started)))
            said = simulate(table, Costs(FORWARD, INPUTS, WEIGHTS)).seconds
            if mesh.leads:
                found = sorted(seconds)[len(seconds) // 2]
                rows.append({
                    "figure": f"executor of {name} with passes of {FORWARD}, {INPUTS}, {WEIGHTS} s on {size} ranks, {2 * size} micro-batches",
                    "value": found, "unit": "s", "n": arguments.rounds, "technique": f"pipeline schedule/{name}",
                    "ratio": found / said, "peer": "simulated", "peer_value": said,
                })  # fmt: skip
    if mesh.leads:
        arguments.out.write_text(json.dumps(rows))


def _slow(compute: Callable[[Any], None]) -> Callable[[Any], None]:
    def slow(key: Any) -> None:
        time.sleep(WEIGHTS)
        compute(key)

    return slow


class _Sleep(torch.autograd.Function):
    """y = x w; both directions sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any) -> Tensor:
        time.sleep(FORWARD)
        ctx.module = module
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        time.sleep(INPUTS if ctx.module.deferred() else INPUTS + WEIGHTS)
        return grad, torch.zeros(1), None


class _Sleeping(nn.Module):
    """A stage whose passes sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def deferred(self) -> bool:
        """Whether the weights' part of the backward pass under way sleeps later."""
        return False

    def forward(self, x: Tensor) -> Tensor:
        """x of the same shape."""
        return _Sleep.apply(x, self.weight, self)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--injected", action="store_true")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
