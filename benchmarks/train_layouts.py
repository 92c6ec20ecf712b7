"""Training on several GPUs: every layout checked against one GPU, then timed beside torch's FSDP2 around the same decoder.

    python -m benchmarks.train_layouts --ranks 2 --check                                    # losses of every layout, small, float32
    python -m benchmarks.train_layouts --ranks 2 --shape llama3-8b --layers 12 --compile --layouts zero2 fsdp2 tp
    python -m benchmarks.train_layouts --ranks 2 --device cpu --check                       # the same over gloo
    python -m benchmarks.train_layouts --ranks 2 --shape deepseek-v3-16b --layers 8 --seq-len 4096 --layouts zero2 zero2-ep zero2-ep-peer

One torchrun; layouts take turns, `--steps` steps each a round, the median step counts. Rows say tokens/s a GPU, MFU in both conventions,
the peak of memory, what was predicted, and from a trace of several steps, without the first and the last, how much of the communication
ran beside products (`--trace`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch

import numpy as np
import torch

from benchmarks import gaps
from benchmarks.ranks import forget, on_ranks, torch_step
from benchmarks.train import SHAPES, SHEET_PEAK, flops_per_token, random_batch, random_decoder
from hone.base.ranks import Mesh
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.training import Training
from hone.feed.load import Batch
from hone.measure.machine import describe
from hone.model.config import ModelConfig
from hone.model.decoder import Decoder
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS
from hone.train.fp8.fits import fp8_products
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.passes import share
from hone.train.precision import FP8_RECIPES, TORCH_NAMES
from hone.train.schedules.cosine import Cosine

TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
EP = "expert_parallel_degree"
SCHEDULE = "pipeline_parallel_schedule"
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"data_parallel": "zero1"},
    "zero2": {"data_parallel": "zero2"},
    "zero3": {"data_parallel": "zero3"},
    "tp": {TP: -1},
    "zero3-never": {"data_parallel": {"kind": "zero3", "reshard_after_forward": "never"}},
    "tp-async": {TP: -1, "enable_async_tensor_parallel": True},
    "tp-no-sp": {TP: -1, "enable_sequence_parallel": False},
    "cp-ring": {CP: -1, "data_parallel": "zero2"},
    "cp-all_gather": {CP: -1, "context_parallel": "all_gather", "data_parallel": "zero2"},
    "cp-ulysses": {CP: -1, "context_parallel": "ulysses", "data_parallel": "zero2"},
    **{f"pp-{kind}": {PP: -1, SCHEDULE: kind} for kind in (
        "naive", "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v",
    )},
    "hsdp": {"data_parallel": {"kind": "zero2", "data_parallel_replicate_degree": 2}},
    "zero2-tp": {TP: 2, "data_parallel": "zero2"},
    "zero1-pp-zb_v": {PP: 2, SCHEDULE: "zb_v", "data_parallel": "zero1"},
    "tp-pp-1f1b": {TP: 2, PP: 2},
    "zero3-cp": {CP: 2, "data_parallel": "zero3"},
    **{f"{kind}-ep": {EP: -1, "data_parallel": kind} for kind in ("ddp", "zero1", "zero2", "zero3")},
    **{f"{kind}-ep-peer": {EP: -1, "data_parallel": kind, "expert_parallel_comm_backend": "peer_copies"} for kind in ("zero2", "zero3")},
    "zero2-ep2": {EP: 2, "data_parallel": "zero2"},
}  # fmt: skip
"""Parallelism by name; -1: all ranks. Those with a degree of 2 need four. Those that divide experts are run where they are named."""
TRACED = 4
"""Steps of a trace, of which the first and the last do not count."""
SMALL = Shape(
    hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=32, intermediate_size=512, max_seq_len=512
)
EXPERTS = {
    "kind": "moe", "num_experts": 16, "intermediate_size": 128, "num_shared_experts": 1, "router": {"kind": "softmax", "top_k": 4},
    "balance": ["bias"],
}  # fmt: skip


def main() -> None:
    """Starts the ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    on_ranks("train_layouts", _arguments(), _work)


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every layout in turn; rank 0 writes the rows."""
    mesh = Mesh.from_environment()
    device = mesh.place(arguments.device)
    rows = []
    for name in arguments.layouts or _those_of(arguments.ranks):
        try:
            with mesh.together():
                rows += (_checked if arguments.check else _timed)(name, mesh, device, arguments)
        except Exception as error:  # a layout that fails must not cost the others
            if mesh.leads:
                print(f"{name}: left out, {type(error).__name__}: {str(error)[:500]}", flush=True)
            forget(error)
        if mesh.leads:
            arguments.out.write_text(json.dumps(rows))
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    if mesh.leads:
        _compare(rows)


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Prints what was predicted beside what was measured."""
    print(
        f"\n{'layout':<14} {'tokens/s a GPU':>14} {'predicted':>10} {'time pred/meas':>14} {'GiB':>6} {'predicted':>9} {'hidden':>7}"
    )
    for row in rows:
        if "predicted" not in row:
            continue
        name, memory = (
            row["technique"].partition("/")[2],
            (row["peak_bytes"] / 2**30, row["predicted_peak_bytes"] / 2**30),
        )
        hidden = f"{row['hidden']:.0%}" if row.get("hidden") is not None else "-"
        print(
            f"{name:<14} {row['value']:>14,.0f} {row['predicted']:>10,.0f} {row['value'] / row['predicted']:>14.3f} "
            f"{memory[0]:>6.1f} {memory[1]:>9.1f} {hidden:>7}",
            flush=True,
        )


def _those_of(num_ranks: int) -> list[str]:
    """The layouts for so many ranks."""
    found = []
    for name, given in LAYOUTS.items():
        degrees = [value for key, value in given.items() if key in (TP, CP, PP)]
        shards = isinstance(given.get("data_parallel"), dict)
        if EP not in given and (num_ranks >= 4 or not (shards or any(value > 1 for value in degrees))):
            found.append(name)
    return found


def _parallelism(name: str, num_ranks: int) -> Parallelism:
    return Parallelism.read({key: num_ranks if value == -1 else value for key, value in LAYOUTS[name].items()})


def _micro_batches(parallelism: Parallelism, arguments: argparse.Namespace) -> int:
    """Of a step: pipelines need several."""
    return arguments.micro_batches * (4 if arguments.check and parallelism.pipeline_parallel_degree > 1 else 1)


def _trainer(
    model: Decoder, parallelism: Parallelism, mesh: Mesh, device: str, precision: Any, arguments: argparse.Namespace
) -> Trainer:
    ranks = parallelism.ranks(mesh, device)
    made = parallelism.trainer()(
        parallelism.decoder(model, ranks, arguments.seq_len),
        steps=10**6,
        schedule=Cosine(warmup=0, floor=1.0),
        optimizer=AdamW(lr=3e-3 if arguments.check else 1e-4),
        precision=precision,
        gradient_accumulation_steps=_micro_batches(parallelism, arguments),
        activation_checkpointing=ACTIVATION_CHECKPOINTINGS.read(json.loads(arguments.activation_checkpointing)),
        compile=arguments.compile,
        ranks=ranks,
    )
    if arguments.exact_sizes:
        made.rooms.fixed = False
    return made


def _checked(name: str, mesh: Mesh, device: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Four steps of a small model in `name` and in one process, in float32: the largest difference of a loss."""
    vocab, rows, steps = 1021, 8, 4
    arguments.seq_len = 128
    config = (SMALL.model_copy(update={"feed_forward": (EXPERTS,)}) if EP in LAYOUTS[name] else SMALL).config(vocab)
    draw = np.random.default_rng(1)
    batches = [random_batch(draw, vocab, rows, arguments.seq_len)] * steps  # the same, so that a wrong update shows
    alone = _trainer(random_decoder(config, device), Parallelism(), Mesh(), device, arguments.precision, arguments)
    wanted = [alone.step(one).loss for one in batches]
    del alone
    parallelism = _parallelism(name, mesh.world_size)
    trainer = _trainer(random_decoder(config, device), parallelism, mesh, device, arguments.precision, arguments)
    found = [trainer.step(share(one, *trainer.ranks.data)).loss for one in batches]
    gap = max(abs(one - other) for one, other in zip(wanted, found, strict=True))
    if mesh.leads:
        print(f"{name}: losses {found[0]:.6f} ... {found[-1]:.6f}, largest difference {gap:.2e}", flush=True)
    what = f"{name} on {mesh.world_size} {device.partition(':')[0]} ranks, {arguments.precision}, 4 steps: largest difference of a loss"
    return [{"figure": what, "value": gap, "unit": "nats", "n": steps, "technique": f"layout/{name}"}]


def _timed(name: str, mesh: Mesh, device: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a step, memory, and beside them what was predicted."""
    shape, vocab = SHAPES[arguments.shape]
    shape = shape.model_copy(
        update={"num_layers": arguments.layers or shape.num_layers, "max_seq_len": arguments.seq_len}
    )
    config = shape.config(vocab)
    peer = name == "fsdp2"
    parallelism = Parallelism(data_parallel="zero3") if peer else _parallelism(name, mesh.world_size)
    degrees = parallelism.degrees(mesh.world_size)
    torch.cuda.reset_peak_memory_stats()
    draw = np.random.default_rng(mesh.rank // (mesh.world_size // degrees.dp))
    model = random_decoder(config, device)
    # Each data-parallel rank computes `--batch` sequences, ranks that share sequences together as many as they are.
    each = arguments.batch * mesh.world_size // degrees.dp
    batches = [random_batch(draw, vocab, each, arguments.seq_len) for _ in range(2)]
    step: Callable[[Batch], float]
    if peer:
        step = torch_step("fsdp2", model, device, torch.bfloat16, compile=arguments.compile)
    else:
        trainer = _trainer(model, parallelism, mesh, device, arguments.precision, arguments)
        step = lambda batch: trainer.step(batch).loss  # noqa: E731
    del model
    losses = [step(batches[0])]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(batches[1])
    # One after the other, as in a training: what a step leaves under way passes beside the next one's start.
    ends = []
    for number in range(1 + arguments.steps):
        losses.append(step(batches[number % 2]))
        ends.append(time.perf_counter())
    torch.cuda.synchronize()
    every = mesh.gather([end - begin for begin, end in pairwise(ends)])
    times = [max(ranks) for ranks in zip(*every, strict=True)]
    seconds, peak = statistics.median(times), max(mesh.gather(torch.cuda.max_memory_allocated()))
    kept = arguments.trace_folder if mesh.leads else None
    traced = _traced(lambda: step(batches[0]), kept and kept / f"{name}.json.gz") if arguments.trace else None
    waits = gaps.waiting_lines(lambda: step(batches[0])) if arguments.trace else {}
    if not mesh.leads:
        return []
    rate = arguments.batch * arguments.seq_len / seconds
    causal, full = flops_per_token(config, arguments.seq_len)
    limit = next((value for key, value in SHEET_PEAK.items() if key in torch.cuda.get_device_name(device)), 989e12)
    what = f"{arguments.shape}{f', {config.num_layers} layers' if arguments.layers else ''} on {mesh.world_size} GPUs, {arguments.precision}"
    what += f", {arguments.batch} x {arguments.seq_len} a GPU{', compiled' * arguments.compile}{', exact sizes' * arguments.exact_sizes}: {name}"
    note = f"{seconds:.4g} s a step, MFU {full * rate / limit:.1%} with attention in full"
    row = {
        "figure": what,
        "value": rate,
        "unit": "tokens/s a GPU",
        "n": arguments.steps,
        "of_limit": causal * rate / limit,
    }
    row |= {"technique": f"layout/{name}", "peak_bytes": peak}
    if not peer:
        work = _sizes(config, parallelism, mesh.world_size, each * degrees.dp, arguments)
        machine = describe("cuda").model_copy(update={"num_ranks": mesh.world_size})
        told = step_seconds(work, machine)
        predicted, grown = told.value, growth_bytes(work, "cuda").value
        print(f"  predicted: {told.formula}", flush=True)
        row |= {
            "predicted": each * degrees.dp * arguments.seq_len / mesh.world_size / predicted,
            "predicted_peak_bytes": grown,
            "config": _config(parallelism, mesh.world_size, each * degrees.dp, arguments),
        }
        note += f"; predicted {predicted:.4g} s and {grown / 2**30:.1f} GiB, {peak / 2**30:.1f} measured"
    if traced is not None:
        hidden = "none" if traced.hidden is None else f"{traced.hidden:.0%}"
        note += f"; traced: {hidden} of the communication beside computation, {traced.exposed_s * 1e3:.1f} ms of it exposed, GPU busy "
        note += f"{traced.busy:.1%} of {TRACED - 2} steps between others"
        row |= {"hidden": traced.hidden, "exposed_s": traced.exposed_s, "busy": traced.busy}
        print("\n".join(traced.lines()), flush=True)
        told = ", ".join(f"{line} ({count})" for line, count in sorted(waits.items(), key=lambda one: -one[1]))
        print(f"lines that made the host wait for the GPU in a step (times): {told or 'none'}", flush=True)
    print(f"{name}: {rate:,.0f} tokens/s a GPU, {note}, loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    print(f"  seconds of the steps: {' '.join(f'{one:.4f}' for one in times)}", flush=True)
    if not peer and trainer.rooms.bound is not None:
        print(
            f"  rows of experts: rooms of {trainer.rooms.bound.rows}, {trainer.rooms.bound.overflows} passes made again",
            flush=True,
        )
    return [{**row, "note": note}]


def _sizes(
    config: ModelConfig, parallelism: Parallelism, num_ranks: int, rows: int, arguments: argparse.Namespace
) -> Training:
    """The sizes of the training, for its estimates."""
    dtype = TORCH_NAMES[arguments.precision]
    costs = partial(AdamW().cost, dtype=dtype, device="cuda")
    shared = parallelism.shared(config, costs, arguments.micro_batches, arguments.seq_len)
    kept = ACTIVATION_CHECKPOINTINGS.read(json.loads(arguments.activation_checkpointing))
    return Training(
        model=config.dims(),
        steps=1,
        batch_size=rows,
        seq_len=arguments.seq_len,
        dtype=dtype,
        segments=kept.segments(config.num_layers),
        update=shared.update,
        gradient_accumulation_steps=arguments.micro_batches,
        packed=False,
        divided=parallelism.with_experts(parallelism.divided(num_ranks), config),
        experts=parallelism.expert_rows,
        context=parallelism.context_parallel.cost(),
        context_degree=parallelism.context_parallel_degree,
        tensor=shared.tensor,
        pipeline=shared.pipeline,
        fp8=fp8_products(arguments.precision),
        fp8_recipe=FP8_RECIPES.get(arguments.precision, ""),
    )


def _config(parallelism: Parallelism, num_ranks: int, rows: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `benchmarks.predicted.estimates` makes the estimates from again."""
    return {
        "room": "training",
        "shape": arguments.shape,
        **({"layers": arguments.layers} if arguments.layers else {}),
        "batch_size": rows,
        "seq_len": arguments.seq_len,
        "precision": arguments.precision,
        "passes": arguments.micro_batches,
        "recomputation": json.loads(arguments.activation_checkpointing),
        "parallelism": parallelism.model_dump(mode="json", exclude_defaults=True),
        "ranks": num_ranks,
        "compiled": arguments.compile,
    }


def _traced(step: Callable[[], Any], kept: Path | None) -> gaps.Account | None:
    """The account of a trace of TRACED steps one after the other: what a step leaves under way, such as gathers of new weights, passes beside the
    next one, as in a training."""
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if kept else [ProfilerActivity.CUDA]
    ) as found:
        torch.cuda.synchronize()
        for _ in range(TRACED):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = kept or Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(path))
        return gaps.account(gaps.read(path), TRACED)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true", help="compare losses with one process instead of timing")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, "fsdp2"])
    parser.add_argument("--shape", default="llama3-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="so many layers instead of the shape's")
    parser.add_argument("--precision", default="", help="fp32 for --check, else bf16")
    parser.add_argument("--batch", type=int, default=1, help="sequences a GPU and step")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--activation-checkpointing", default='"none"', help="as JSON")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--exact-sizes", action="store_true", help="hosts wait for the sizes of experts' rows in every layer"
    )
    parser.add_argument("--trace", action="store_true", help="a few more steps under torch's profiler")
    parser.add_argument("--trace-folder", type=Path, help="keeps rank 0's trace of them")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.precision = arguments.precision or ("fp32" if arguments.check else "bf16")
    return arguments


if __name__ == "__main__":
    main()
