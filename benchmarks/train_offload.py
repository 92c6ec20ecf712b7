"""Training with what does not fit on the device in host memory or on disk, beside the same layers all on the device.

    python -m benchmarks.train_offload --device cuda                 # one H100: 8B from the host beside 8 of its layers; 4 minutes
    python -m benchmarks.train_offload --device cuda --layers 14 --peer-path DIR  # and 14 layers beside DeepSpeed
    python -m benchmarks.train_offload --device cuda --part 30b      # as many layers of a 32B shape as host and disk take; 4 minutes
    python -m benchmarks.train_offload                               # a CPU, the tiny shape, every place

First all places train the same small model for three steps and must agree. Then they are timed: on a GPU the resident rate of FLOPs
of some of the layers, and all layers with the optimizer on the host (`of_resident`); with `--part 30b` masters and optimizer
state in host memory and scratch files, whose bytes decide the number of layers. Weights and tokens are random. The fastest step
counts; `predicted` is from this machine's calibration and a longer measurement of its disk; `overlap` is the share of the
update's parts (host's step, link, disk), but for the longest, that ran beside it. After `--limit` seconds no other training is begun.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from benchmarks import ledger
from benchmarks.train import SHAPES, random_batch
from hone.base.figure import human_bytes
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.offload import places, stepped, times
from hone.cost.train.training import Training
from hone.cost.train.update import update_seconds
from hone.measure.calibrate import calibrate
from hone.measure.machine import describe
from hone.model.config import ModelConfig
from hone.model.decoder import unmade
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS, OFFLOADS
from hone.train.loop import Trainer
from hone.train.offload.rates import Rates, probe, rates_of
from hone.train.offload.steps import HostSteps
from hone.train.offload.techniques import Offload
from hone.train.optimizers.adamw import AdamW
from hone.train.precision import TORCH_NAMES
from hone.train.schedules.cosine import Cosine

BIG = Shape(hidden_size=5120, num_layers=64, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=25600,
            max_seq_len=8192, rope_theta=1e6, tie_embeddings=False), 151936  # fmt: skip
"""Qwen3-32B's."""

PLACES: tuple[dict[str, Any], ...] = (
    {"kind": "host"},
    {"kind": "host", "gradients": True},
    {"kind": "host", "parameters": True},
    {"kind": "nvme"},
    {"kind": "nvme", "parameters": True},
    {"kind": "host", "delayed_update": True, "delayed_update_after": 9},
)
SPARE_DISK = 5e9
"""Bytes of the disk that the 30b part leaves free."""


class RandomMaker:
    """Draws a decoder's weights on the device, a part at a time."""

    def __init__(self, device: str) -> None:
        self._device = device

    def make(self, part: nn.Module, path: str) -> None:
        """As `hone.model.decoder.Maker.make`."""
        for parameter in part.to_empty(device=self._device).parameters():
            nn.init.normal_(parameter.detach(), 1.0 if parameter.ndim == 1 else 0.0, 0.02)


def main() -> None:
    """Checks, times, prints a table and a JSON line per row, adds the rows to the ledger unless told not to."""
    arguments = _arguments()
    begun = time.perf_counter()
    _agree(arguments)
    calibrate(arguments.device, "bfloat16")
    if arguments.device != "cpu":
        calibrate("cpu", "float32")
    rates = _rates(arguments)
    print(f"rates: {_in_words(rates)}", flush=True)
    rows: list[dict[str, Any]] = []
    for name, config, offload in _trainings(arguments, rates):
        if time.perf_counter() - begun > arguments.limit:
            print(f"left out for want of time: {name} {offload.kind}")
            continue
        row = _timed(arguments, name, config, offload, rates)
        if rows and rows[0]["technique"] == "offload/none":
            row |= {"of_resident": row["flops_per_s"] / rows[0]["flops_per_s"]}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.peer_path is not None:
        _beside(arguments, rows)
    print(ledger.table(rows))
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if not arguments.no_ledger:
        ledger.append("train", rows, device=arguments.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", choices=["8b", "30b", "tiny"], help="default: 8b on a GPU, else tiny")
    parser.add_argument("--folder", default=".", help="where scratch files are")
    parser.add_argument("--rows", type=int, help="sequences of a step")
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int, help="timed, after one that is not; default: 2, of 30b 1")
    parser.add_argument("--resident-layers", type=int, default=8)
    parser.add_argument(
        "--disk-s", type=float, default=20.0, help="seconds that the disk of a 30b step may take at most"
    )
    parser.add_argument(
        "--probe-gib", type=float, default=8.0, help="size of the file with which 30b measures the disk"
    )
    parser.add_argument("--spare-host", type=float, default=26e9, help="bytes of host memory that 30b leaves free")
    parser.add_argument("--layers", type=int, help="of 8b, a third training from the host: of so many layers")
    parser.add_argument(
        "--peer-path", help="folders of DeepSpeed's packages: runs benchmarks.train_offload_peer on them"
    )
    parser.add_argument("--peer-limit", type=float, default=180.0, help="seconds that it may take")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which no other training is begun")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    arguments.part = arguments.part or ("8b" if on_gpu else "tiny")
    rows, micro = {"8b": (12, 6), "30b": (2, 1), "tiny": (4, 2)}[arguments.part]
    arguments.rows, arguments.micro_batches = arguments.rows or rows, arguments.micro_batches or micro
    arguments.steps = arguments.steps or (1 if arguments.part == "30b" else 2)
    arguments.seq_len = arguments.seq_len or (8192 if on_gpu else 128)
    return arguments


def _trainings(arguments: argparse.Namespace, rates: Rates) -> list[tuple[str, ModelConfig, Offload]]:
    """(name, config, places) of what is timed."""
    if arguments.part == "tiny":
        shape, vocab = SHAPES["tiny"]
        kinds = [{"kind": "none"}, *PLACES]
        return [("tiny", shape.config(vocab), _read(arguments, one)) for one in kinds]
    if arguments.part == "8b":
        shape, vocab = SHAPES["llama3-8b"]
        few = shape.model_copy(update={"num_layers": arguments.resident_layers})
        name = f"llama3-8b, {arguments.resident_layers} layers"
        found = [(name, few.config(vocab), {"kind": "none"}), ("llama3-8b", shape.config(vocab), {"kind": "host"})]
        if arguments.layers:
            part = shape.model_copy(update={"num_layers": arguments.layers}).config(vocab)
            found.append((f"llama3-8b, {arguments.layers} layers", part, {"kind": "host"}))
        return [(name, config, _read(arguments, one)) for name, config, one in found]
    shape, vocab = BIG
    status = os.statvfs(arguments.folder)
    disk = min(status.f_bavail * status.f_frsize - SPARE_DISK, arguments.disk_s * min(rates.read, rates.write))
    free = min(describe("cpu").free_memory_bytes, psutil.virtual_memory().available)
    host = free - arguments.spare_host - 4 * 2 * vocab * shape.hidden_size
    device = 0.75 * describe(arguments.device).memory_bytes  # weights and gradients in bf16
    one, two = (shape.model_copy(update={"num_layers": count}).config(vocab).num_params for count in (1, 2))
    most = min((disk + host) / 12, device / 4)
    layers = int(min(shape.num_layers, (most - (2 * one - two)) // (two - one)))
    told = f"{human_bytes(disk)} of disk and {human_bytes(host)} of host memory"
    print(f"{layers} of {shape.num_layers} layers of {two - one:,} weights: {told} for 12 bytes a weight", flush=True)
    config = shape.model_copy(update={"num_layers": layers}).config(vocab)
    kept = max(12 * config.num_params - disk, 0)
    return [(f"qwen3-32b, {layers} of 64 layers", config, _read(arguments, {"kind": "nvme", "host_bytes": int(kept)}))]


def _read(arguments: argparse.Namespace, place: dict[str, Any]) -> Offload:
    more = {"folder": arguments.folder} if place["kind"] == "nvme" else {}
    found: Offload = OFFLOADS.read({**place, **more})
    return found


def _rates(arguments: argparse.Namespace) -> Rates:
    """As a plan has them, with the disk measured for longer where it matters."""
    found = rates_of(describe(arguments.device), arguments.folder)
    if arguments.part == "30b":
        measured = probe(Path(arguments.folder), int(arguments.probe_gib * 2**30))
        if measured is not None:
            told = f"{found.said}, for {arguments.probe_gib:g} GiB"
            found = replace(found, read=measured[0], write=measured[1], said=told)
    return found


def _trainer(arguments: argparse.Namespace, config: ModelConfig, offload: Offload) -> Trainer:
    return Trainer(
        unmade(config, RandomMaker(arguments.device)) if offload.leaves else _whole(config, arguments.device),
        steps=10**6,
        schedule=Cosine(warmup=0, floor=1.0),
        optimizer=AdamW(),
        precision="bf16",
        gradient_accumulation_steps=arguments.micro_batches,
        activation_checkpointing=_policy(),
        offload=offload,
    )


def _whole(config: ModelConfig, device: str) -> Any:
    model = unmade(config).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter.detach(), 1.0 if parameter.ndim == 1 else 0.0, 0.02)
    return model


def _policy() -> Any:
    return ACTIVATION_CHECKPOINTINGS.read("full")


def _agree(arguments: argparse.Namespace) -> None:
    """Three steps of the tiny shape in every place: raises where losses or weights differ."""
    shape, vocab = SHAPES["tiny"]
    draw = np.random.default_rng(0)
    batches = [random_batch(draw, vocab, 2 * arguments.micro_batches, 128) for _ in range(3)]
    found = {}
    for place in ({"kind": "none"}, *PLACES):
        torch.manual_seed(0)
        trainer = _trainer(arguments, shape.config(vocab), _read(arguments, place))
        losses = [trainer.step(batch).loss for batch in batches]
        trainer.update.weights.settle()
        masters = {name: one.detach().cpu().clone() for name, one in trainer.update.weights.masters.items()}
        found[str(place)] = losses, masters
    (losses, masters), *others = found.values()
    for place, (theirs, weights) in zip(list(found)[1:], others, strict=True):
        assert np.allclose(losses, theirs, rtol=0, atol=2e-3), f"{place}: losses {losses} and {theirs}"
        gap = max((one - weights[name]).abs().max().item() for name, one in masters.items())
        # A GPU sums some gradients in another order each time; where one is about zero, a step may have either sign.
        assert gap < (1e-6 if arguments.device == "cpu" else 1e-2), f"{place}: weights differ by {gap}"
        print(f"{place} agrees: weights to {gap:.1e} after three steps", flush=True)


def _timed(
    arguments: argparse.Namespace, name: str, config: ModelConfig, offload: Offload, rates: Rates
) -> dict[str, Any]:
    """A row: tokens a second of the fastest of `--steps` steps after one, its parts, memory, and the estimates."""
    gc.collect()
    on_gpu = arguments.device.startswith("cuda")
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    trainer = _trainer(arguments, config, offload)
    print(
        f"{name} {offload.kind}: {config.num_params:,} weights made in {time.perf_counter() - begun:.0f} s", flush=True
    )
    draw = np.random.default_rng(1)
    whole: list[float] = []
    updates: list[float] = []
    waits: list[float] = []
    weights = trainer.update.weights
    for step in range(arguments.steps + 1):
        batch = random_batch(draw, config.vocab_size, arguments.rows, arguments.seq_len)
        before, disk = _spent(weights)
        _wait(on_gpu)
        begun = time.perf_counter()
        trainer.step(batch)
        _wait(on_gpu)
        took = time.perf_counter() - begun
        after, disk_after = _spent(weights)
        spent, waited = after - before, disk_after - disk
        if step:
            whole, updates, waits = [*whole, took], [*updates, spent], [*waits, waited]
        said = f", of which it waited {waited:.3f} s for the disk" if offload.to_files else ""
        print(f"{name} {offload.kind}: step {step} {took:.3f} s, update on the host {spent:.3f} s{said}", flush=True)
    step_s, tokens = min(whole), arguments.rows * arguments.seq_len
    update_s = updates[whole.index(step_s)]
    work, machine = _work(arguments, config, offload), describe(arguments.device)
    resident = step_seconds(replace(work, offload=OFFLOADS.read("none")), machine)
    here = update_seconds(work.update, work.part, machine, work.dtype).value
    predicted = stepped(resident, here, offload, work.load, machine, rates)
    told = times(offload, work.load, machine, resident.value - here, rates)
    host = psutil.Process().memory_info().rss
    row = {
        "figure": f"training step, {name}, bf16, {arguments.rows} x {arguments.seq_len}, offload {_said(offload)}",
        "technique": f"offload/{offload.kind}",
        "value": tokens / step_s,
        "unit": "tokens/s",
        "n": arguments.steps,
        "params": config.num_params,
        "predicted": tokens / predicted.value,
        "step_s": step_s,
        "flops_per_s": 3 * tokens / step_s * config.flops_per_token(arguments.seq_len),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "predicted_peak_bytes": growth_bytes(work, arguments.device).value,
        "note": f"{step_s:.3g} s a step, predicted {predicted.value:.3g} s; {torch.get_num_threads()} threads, every layer "
        f"recomputed, {arguments.micro_batches} micro-batches; host memory {human_bytes(host)}; {'; '.join(places(offload, work.load, arguments.device).said)}",
    }
    if told is not None:
        longest, total = max(told.parts), sum(told.parts)
        overlap = min(max((total - update_s) / (total - longest), 0.0), 1.0) if total > longest else 1.0
        row |= {"update_s": update_s, "predicted_update_s": told.update, "overlap": overlap}
        row["note"] = f"{row['note']}; update {update_s:.3g} s, predicted {told.update:.3g} s of {_in_words(rates)}"
    if isinstance(weights, HostSteps) and weights.files is not None:
        row["io_s"], file = waits[whole.index(step_s)], weights.files.file
        each = human_bytes((file.read_bytes + file.written_bytes) / (arguments.steps + 1))
        row["note"] += f"; {each} read and written an update, which waited {row['io_s']:.3g} s for it"
    return row


def _spent(weights: Any) -> tuple[float, float]:
    """Seconds of all updates on the host so far, and those of them in which they waited for the disk."""
    if not isinstance(weights, HostSteps):
        return 0.0, 0.0
    return weights.update_s, 0.0 if weights.files is None else weights.files.file.io_s


def _beside(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Runs the peer, in a process of its own, and puts its figures beside those of the same weights; says why there are none."""
    gc.collect()
    if arguments.device.startswith("cuda"):
        torch.cuda.empty_cache()
    layers = arguments.layers or SHAPES["llama3-8b"][0].num_layers
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        told = {"layers": layers, "rows": arguments.rows, "micro-batches": arguments.micro_batches}
        told |= {"seq-len": arguments.seq_len, "steps": arguments.steps, "json": out}
        command = [sys.executable, "-m", "benchmarks.train_offload_peer", *(f"--{key}={told[key]}" for key in told)]
        path = os.pathsep.join([arguments.peer_path, os.environ.get("PYTHONPATH", ".")])
        try:
            subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=arguments.peer_limit, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"no figures of the peer: {error}")
            return
        peer = json.loads(out.read_text())
    params = peer.pop("params")
    for row in rows:
        if row["params"] == params and row["technique"] != "offload/none":
            row |= {**peer, "ratio": row["value"] / peer["peer_value"]}


def _said(offload: Offload) -> str:
    return " ".join([offload.kind, *offload.chosen])


def _in_words(rates: Rates) -> str:
    shown = {key: f"{value / 1e9:.1f} GB/s" for key, value in asdict(rates).items() if key != "said"}
    return ", ".join(f"{key} {value}" for key, value in shown.items()) + f" ({rates.said})"


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _work(arguments: argparse.Namespace, config: ModelConfig, offload: Offload) -> Training:
    dims = config.dims()
    return Training(
        model=dims,
        steps=1,
        batch_size=arguments.rows,
        seq_len=arguments.seq_len,
        dtype=TORCH_NAMES["bf16"],
        segments=_policy().segments(dims.num_layers),
        update=AdamW().cost(dims, TORCH_NAMES["bf16"], arguments.device),
        gradient_accumulation_steps=arguments.micro_batches,
        packed=False,
        offload=offload,
    )


if __name__ == "__main__":
    main()
