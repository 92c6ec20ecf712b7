"""Training with optimizer and master weights on the host, beside the same training with all of it on the device.

    python -m benchmarks.train_offload --device cuda                 # one H200: 1B both ways, then 8B from the host; minutes
    python -m benchmarks.train_offload                               # a CPU, the tiny shape, both ways

First both train the same small model for three steps and must agree. Then they are timed, resident and from the host, on
a model that fits, and from the host on `--large`. Weights and tokens are random, drawn on the device; nothing is loaded. The
fastest step counts; `of_resident` is the rate of FLOPs beside that of the model that fits. After `--limit` seconds no other
training is begun.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.train import SHAPES, random_batch, random_decoder
from hone.measure.machine import describe
from hone.train import ACTIVATION_CHECKPOINTINGS, OFFLOADS
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.precision import TORCH_NAMES
from hone.train.schedules.cosine import Cosine
from hone.train.work import Work, growth_bytes, step_seconds


def main() -> None:
    """Checks, times, prints a table and a JSON line per row, adds the rows to the ledger unless told not to."""
    arguments = _arguments()
    begun = time.perf_counter()
    _agree(arguments)
    rows: list[dict[str, Any]] = []
    for shape, offload in ((arguments.shape, "none"), (arguments.shape, "host"), (arguments.large, "host")):
        if shape is None:
            continue
        if time.perf_counter() - begun > arguments.limit:
            print(f"left out for want of time: {shape} {offload}")
            continue
        row = _timed(arguments, shape, offload)
        if rows:
            row |= {"of_resident": row["flops_per_s"] / rows[0]["flops_per_s"]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(ledger.table(rows))
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if not arguments.no_ledger:
        ledger.append("train", rows, device=arguments.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--large", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, help="sequences of a step")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no other training is begun")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    arguments.large = arguments.large or ("llama3-8b" if on_gpu and arguments.shape is None else None)
    arguments.shape = arguments.shape or ("llama3-1b" if on_gpu else "tiny")
    arguments.rows = arguments.rows or (8 if on_gpu else 4)
    arguments.seq_len = arguments.seq_len or (8192 if on_gpu else 128)
    return arguments


def _trainer(arguments: argparse.Namespace, shape: str, offload: str) -> Trainer:
    sizes, vocab = SHAPES[shape]
    return Trainer(
        random_decoder(sizes.config(vocab), arguments.device),
        steps=10**6,
        schedule=Cosine(warmup=0, floor=1.0),
        optimizer=AdamW(),
        precision="bf16",
        gradient_accumulation_steps=arguments.micro_batches,
        activation_checkpointing=_policy(),
        offload=OFFLOADS.read(offload),
    )


def _policy() -> Any:
    return ACTIVATION_CHECKPOINTINGS.read({"kind": "every_nth", "n": 2})


def _agree(arguments: argparse.Namespace) -> None:
    """Three steps of the tiny shape, both ways: raises where losses or weights differ."""
    _, vocab = SHAPES["tiny"]
    draw = np.random.default_rng(0)
    batches = [random_batch(draw, vocab, 4, 128) for _ in range(3)]
    one, other = (_trainer(arguments, "tiny", offload) for offload in ("none", "host"))
    for batch in batches:
        first, second = one.step(batch), other.step(batch)
        assert abs(first.loss - second.loss) < 2e-3, f"losses {first.loss} and {second.loss}"
    gap = max(
        (master.detach().cpu() - other.update.weights.masters[name]).abs().max().item()
        for name, master in one.update.weights.masters.items()
    )
    # A GPU sums some gradients in another order each time; where one is about zero, a step may have either sign.
    assert gap < (1e-6 if arguments.device == "cpu" else 1e-2), f"weights differ by {gap}"
    print(f"both ways agree: weights to {gap:.1e} after three steps", flush=True)


def _timed(arguments: argparse.Namespace, shape: str, offload: str) -> dict[str, Any]:
    """A row: tokens a second of the fastest of `--steps` steps after one, its parts, memory, and the estimates."""
    gc.collect()
    on_gpu = arguments.device.startswith("cuda")
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = _trainer(arguments, shape, offload)
    config = trainer.model.config
    draw = np.random.default_rng(1)
    whole, update, apply = [], [], trainer.update.apply
    spent = 0.0

    def timed(*numbers: float) -> None:
        nonlocal spent
        _wait(on_gpu)
        begun = time.perf_counter()
        apply(*numbers)
        _wait(on_gpu)
        spent = time.perf_counter() - begun

    trainer.update.apply = timed  # type: ignore[method-assign]
    for step in range(arguments.steps + 1):
        batch = random_batch(draw, config.vocab_size, arguments.rows, arguments.seq_len)
        _wait(on_gpu)
        begun = time.perf_counter()
        trainer.step(batch)
        _wait(on_gpu)
        if step:
            whole.append(time.perf_counter() - begun)
            update.append(spent)
        print(f"{shape} {offload}: step {step} {time.perf_counter() - begun:.3f} s, update {spent:.3f} s", flush=True)
    step_s, tokens = min(whole), arguments.rows * arguments.seq_len
    work, machine = _work(arguments, trainer, offload), describe(arguments.device)
    return {
        "figure": f"training step, {shape}, bf16, {arguments.rows} x {arguments.seq_len}, optimizer {offload}",
        "technique": f"offload/{offload}",
        "value": tokens / step_s,
        "unit": "tokens/s",
        "n": arguments.steps,
        "predicted": tokens / step_seconds(work, machine).value,
        "step_s": step_s,
        "update_s": update[whole.index(step_s)],
        "flops_per_s": 3 * tokens / step_s * config.flops_per_token(arguments.seq_len),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "predicted_peak_bytes": growth_bytes(work, arguments.device).value,
        "note": f"{torch.get_num_threads()} threads; every second layer recomputed",
    }


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _work(arguments: argparse.Namespace, trainer: Trainer, offload: str) -> Work:
    facts = trainer.model.config.facts()
    return Work(
        model=facts,
        steps=1,
        batch_size=arguments.rows,
        seq_len=arguments.seq_len,
        dtype=TORCH_NAMES["bf16"],
        segments=_policy().segments(facts.num_layers),
        update=AdamW().cost(facts, TORCH_NAMES["bf16"], arguments.device),
        gradient_accumulation_steps=arguments.micro_batches,
        packed=False,
        offload=OFFLOADS.read(offload),
    )


if __name__ == "__main__":
    main()
