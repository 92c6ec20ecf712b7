"""LoRA, DoRA and QLoRA on one device: checks and rates of their kernels, hone's steps, and transformers + peft (+ Liger, bitsandbytes) beside.

    python -m benchmarks.finetune --device cuda --shape llama3-8b --peer-path SITE   # all parts, one H100 or H200: about 9 minutes
    python -m benchmarks.finetune --device cuda --parts checks,rates,lora,qlora      # hone alone: about 4 minutes
    python -m benchmarks.finetune                                                    # a CPU, the tiny shape: under a minute

Every part is a process of its own with `--limit` seconds, so that one that fails, hangs or runs out of memory leaves the others.
Rows are printed as they come and go to $OUT/finetune.jsonl if OUT is set; a table of all of them ends the run. Weights and tokens
are random, rank 16 on all linears, AdamW in float32 on the factors alone. Beside each step stand the forecasts of a plan: bytes and seconds from
`hone.cost`, at the rates of this machine's calibration or, without one, of the ledger's of such a GPU. Reads no setting of the device and changes none.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import ledger
from benchmarks.finetune_peer import peer_step
from benchmarks.kernels.lora import RANK, Row, checks, rates
from benchmarks.predicted.rates import kept, stored
from benchmarks.train import SHAPES
from hone.cost.activations.segments import Segment, keep_all
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.training import Training
from hone.measure.machine import describe
from hone.model.adapters.dora_linear import DoRALinear
from hone.model.config import ModelConfig
from hone.model.context import Causal, Packed
from hone.model.decoder import Decoder, unmade
from hone.model.quantized.nf4_base import nf4_base
from hone.model.weights.model import ModelSource, expected_shapes
from hone.ops import linear_cross_entropy
from hone.train import OPTIMIZERS
from hone.train.optimizers.adamw_8bit import AdamW8bitRule
from hone.train.optimizers.base import Entry, Parameter
from hone.train.passes import run_layers
from hone.train.to_cost.adapted import adapted_linears
from hone.train.to_cost.training import LEAN

PARTS = (
    "checks",
    "rates",
    "lora",
    "lora-recomputed",
    "dora",
    "qlora",
    "qlora-kept",
    "qlora-70b",
    "peer-lora",
    "peer-lora-recomputed",
    "peer-qlora",
)
GIB = 2**30


# Steps


class Drawn:
    """Random weights by the names of a config, drawn on the device when they are read: factors B are zero, norms one."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._shapes = expected_shapes(unmade(config))
        self._device, self._seed = device, 0

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name])

    def tensor(self, name: str) -> Tensor:
        shape = self.shape(name)
        if "lora_B" in name or len(shape) < 2:
            return torch.full(shape, float(len(shape) < 2), device=self._device, dtype=torch.bfloat16)
        self._seed += 1
        generator = torch.Generator(self._device).manual_seed(self._seed)
        return torch.empty(shape, device=self._device, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    def file(self, name: str) -> Path:
        return Path(name)

    def close(self) -> None:
        pass

    def reopened(self) -> Drawn:
        return self


def model_of(shape: str, device: str, *, codes: bool, kind: str = "lora") -> Decoder:
    """A random model in bf16 (float32 on a CPU), or with NF4 linears, under an adapter, which alone is trained, in float32."""
    sizes, vocab = SHAPES[shape]
    values = sizes.config(vocab).model_dump(mode="json")
    config = ModelConfig.read({**values, "adapters": [{"kind": kind, "rank": RANK, "alpha": 2 * RANK}]})
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    source = ModelSource(Path("random"), config, {"dtype": "bfloat16"}, Drawn(config, device))
    model = (nf4_base(source, device=device) if codes else source).build(device, dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(module, DoRALinear):
            module.start()
    return model


def step_rows(
    args: argparse.Namespace, *, codes: bool, recomputed: bool, kind: str = "lora", shape: str = "", rows: int = 0,
    tight: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Tokens a second and peak memory of hone's training steps, beside their forecasts; `shape` and `rows` for those asked for.

    `tight`: what recomputed layers keep, their inputs, waits in the host's memory, and moments have 8 bits.
    """
    device, seq_len, shape, rows = args.device, args.seq_len, shape or args.shape, rows or args.rows
    cuda = device.startswith("cuda")
    begun = time.perf_counter()
    model = model_of(shape, device, codes=codes, kind=kind)
    made_s = time.perf_counter() - begun
    config = model.config
    segments = keep_all(config.num_layers)
    segments = tuple(Segment(one.start, one.stop, recomputed, to_host=tight) for one in segments)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer: Any = EightBit(trained) if tight else torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(0, config.vocab_size, (rows, seq_len), device=device)
    targets = tokens.roll(-1, 1)
    ids = documents(rows, seq_len, args.document).to(device) if args.document else None

    def step() -> Tensor:
        x = run_layers(model, tokens, Causal(tokens) if ids is None else Packed(ids), segments)
        loss = linear_cross_entropy(model.head_input(x), model.head_weight, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, seconds, peak = timed(step, cuda, args.steps)
    weights = held_bytes(model)
    name = f"{'Q' if codes else ''}{'LoRA' if kind == 'lora' else 'DoRA'} r{RANK}, {'layers recomputed' if recomputed else 'all kept'}"
    name += ", their inputs on the host, AdamW in 8 bits" if tight else ""
    name += f", documents of {args.document} tokens packed" if args.document else ""
    name += f", {shape}, {rows} x {seq_len}"
    frozen = weights - sum(4 * one.numel() for one in trained) if codes else None
    planned, planned_s = forecast(config, rows, seq_len, segments, device=device, weights=frozen, eight=tight)
    yield {
        "figure": f"hone {name}", "value": rows * seq_len / seconds, "unit": "tokens/s", "peak_gib": peak, "seconds": seconds,
        "forecast_gib": planned / GIB, "forecast_seconds": planned_s,
        "weights_gib": weights / GIB, "made_s": made_s, "trained": sum(one.numel() for one in trained),
        "passed": math.isfinite(losses[-1]) and losses[-1] < losses[0], "losses": losses, "n": args.steps,
    }  # fmt: skip


class EightBit:
    """hone's AdamW with moments of 8 bits, on `parameters`."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._rule, self._done = AdamW8bitRule(0.9, 0.95, 1e-8), 0
        self._all = [(one, Parameter("matrix", tuple(one.shape))) for one in parameters]
        self._states = [self._rule.start(*one) for one in self._all]

    @torch.no_grad()
    def step(self) -> None:
        self._done += 1
        given = zip(self._all, self._states, strict=True)
        entries = [Entry(one, one.grad, state, about) for (one, about), state in given if one.grad is not None]
        self._rule.step(entries, count=self._done, lr=1e-4, weight_decay=0.0)

    def zero_grad(self) -> None:
        for one, _ in self._all:
            one.grad = None


def documents(rows: int, seq_len: int, mean: int) -> Tensor:
    """Document ids [rows, seq_len] of packed texts whose lengths are exponential with this mean, as those of instructions are about."""
    draw = np.random.default_rng(0)
    ends = draw.exponential(mean, (rows, 4 * seq_len // mean + 8)).clip(8).astype(np.int64).cumsum(1)
    return torch.from_numpy(
        np.stack([np.searchsorted(one, np.arange(seq_len), "right") for one in ends]).astype(np.int32)
    )


def timed(step: Callable[[], Tensor], cuda: bool, steps: int) -> tuple[list[float], float, float | None]:
    """(losses, mean seconds of a step after two, GiB at the peak or None where it is not known)."""
    losses = [step() for _ in range(2)]
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    losses += [step() for _ in range(steps)]
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / steps
    return [float(one) for one in losses], seconds, torch.cuda.max_memory_allocated() / GIB if cuda else None


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights, each storage once."""
    held = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in (*model.parameters(), *model.buffers())
    }
    return sum(held.values())


def forecast(
    config: ModelConfig, rows: int, seq_len: int, segments: tuple[Segment, ...], *, device: str, weights: int | None, eight: bool
) -> tuple[float, float | None]:  # fmt: skip
    """(bytes at the peak, seconds) of a step as `hone train --plan` finds them; None where no rates of such a device are known.

    `weights`: bytes of the frozen weights, if they stay codes; `eight`: moments have 8 bits."""
    optimizer = OPTIMIZERS.read({"kind": "adamw_8bit" if eight else "adamw"})
    own, dtype = config.trained_dims(), "bfloat16" if device.startswith("cuda") else "float32"
    work = Training(
        model=config.dims(), steps=1, batch_size=rows, seq_len=seq_len, dtype=dtype, segments=segments, packed=False,
        update=optimizer.cost(own, dtype, device), trained=own, lean=config.adapters[0].kind in LEAN, frozen_bytes=weights,
        adapted=adapted_linears(config),
    )  # fmt: skip
    machine = describe(device)
    if machine.calibration is None:
        alike = [name for name, one in stored().items() if machine.processor == one["processor"]]
        machine = machine.model_copy(update={"calibration": kept(alike[-1]) if alike else None})
    seconds = None if machine.calibration is None else step_seconds(work, machine).value
    return growth_bytes(work, device).value, seconds


def peer_rows(args: argparse.Namespace, *, codes: bool, recomputed: bool) -> Iterator[Row]:
    """Tokens a second and peak memory of the peer's steps."""
    step, name = peer_step(args, RANK, codes=codes, recomputed=recomputed)
    losses, seconds, peak = timed(step, args.device.startswith("cuda"), args.steps)
    yield {
        "figure": f"{name} r{RANK}, {'layers recomputed' if recomputed else 'all kept'}", "unit": "tokens/s", "peak_gib": peak,
        "value": args.rows * args.seq_len / seconds, "seconds": seconds, "losses": losses, "n": args.steps,
    }  # fmt: skip


# The run


def rows_of(part: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of one part, as they come."""
    if part in ("checks", "rates"):
        return {"checks": checks, "rates": rates}[part](args)
    codes = "qlora" in part
    if part == "qlora-70b":
        shape, rows = ("llama3-70b", 1) if args.device.startswith("cuda") else (args.shape, args.rows)
        return step_rows(args, codes=True, recomputed=True, shape=shape, rows=rows, tight=True)
    if part == "dora":
        return step_rows(args, codes=False, recomputed=False, kind="dora")
    recomputed = part.endswith("recomputed") or (codes and not part.endswith("kept"))
    return (peer_rows if part.startswith("peer") else step_rows)(args, codes=codes, recomputed=recomputed)


def run_part(part: str, given: list[str], args: argparse.Namespace, write: Callable[[Row], None]) -> None:
    """Runs one part in its own process and hands on its rows; its failure is a row too."""
    command = [sys.executable, "-m", "benchmarks.finetune", *given, "--one", part]
    environment = dict(os.environ)
    if part.startswith("peer") and args.peer_path:
        environment["PYTHONPATH"] = os.pathsep.join([args.peer_path, environment.get("PYTHONPATH", "")])
    begun = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = child.communicate(timeout=args.limit)
        said = "" if child.returncode == 0 else errors.strip()[-400:]
    except subprocess.TimeoutExpired:
        child.kill()
        out, _ = child.communicate()
        said = f"stopped after {args.limit} s"
    for line in out.splitlines():
        if line.startswith("{"):
            write({"part": part, **json.loads(line)})
    if said:
        write({"part": part, "figure": f"{part} failed", "value": None, "unit": "", "passed": False, "note": said})
    print(f"[{part}: {time.perf_counter() - begun:.0f} s]", flush=True)


def table(rows: list[Row]) -> str:
    """All rows as text: what is measured, what was forecast, and whether a check passed."""
    names = (
        "figure",
        "value",
        "unit",
        "peak_gib",
        "forecast_gib",
        "seconds",
        "forecast_seconds",
        "peer_value",
        "of_limit",
        "passed",
    )
    cells = [list(names)]
    for row in rows:
        found = (row.get(name) for name in names)
        cells.append(["" if one is None else f"{one:.4g}" if isinstance(one, float) else str(one) for one in found])
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def paired(rows: list[Row]) -> list[Row]:
    """The ledger's rows: each of hone's steps, and the peer's of the same part beside it."""
    theirs = {row["part"].removeprefix("peer-"): row for row in rows if row["part"].startswith("peer-")}
    found = []
    for row in rows:
        if row["part"].startswith("peer-") or row["value"] is None or "peak_gib" not in row:
            continue
        line = {key: row[key] for key in ("figure", "value", "unit", "n", "seconds")}
        line |= {"peak_bytes": row["peak_gib"] * GIB, "predicted_peak_bytes": row["forecast_gib"] * GIB}
        line |= {"predicted_seconds": row["forecast_seconds"]} if row.get("forecast_seconds") else {}
        peer = theirs.get(row["part"])
        if peer is not None:
            line |= {"peer": peer["figure"], "peer_value": peer["value"], "peer_peak_bytes": peer["peak_gib"] * GIB}
            line["ratio"] = row["value"] / peer["value"]
        found.append(line)
    return found


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=0, help="tokens of a sequence; 2048, or 64 on a CPU")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--document", type=int, default=0, help="hone: pack texts of this mean length; 0: one a sequence"
    )
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of a part")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--peer-path", default="", help="folder with the peer's packages; without it peers are left out on a GPU"
    )
    parser.add_argument(
        "--from", dest="source", nargs="*", default=[], help="files of a run's $OUT: no run, rows of the ledger"
    )
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.source:
        lines = [json.loads(line) for file in args.source for line in Path(file).read_text("utf8").splitlines()]
        stamp = next(line["stamp"] for line in lines if "stamp" in line)
        print(ledger.table(kept := paired([line for line in lines if "part" in line])))
        ledger.append("finetune", kept, stamp=stamp)
        return
    args.seq_len = args.seq_len or (2048 if args.device.startswith("cuda") else 64)
    if args.one:
        for row in rows_of(args.one, args):
            print(json.dumps(row), flush=True)
        return
    parts = args.parts.split(",")
    if not args.peer_path:
        parts = [part for part in parts if not part.startswith("peer")]
    rows: list[Row] = []
    out = os.environ.get("OUT")

    def write(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if out:
            with open(Path(out) / "finetune.jsonl", "a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")

    if out:
        Path(out, "finetune.jsonl").write_text(json.dumps({"stamp": ledger.stamp_of(args.device)}) + "\n", "utf8")
    for part in parts:
        run_part(part, sys.argv[1:], args, write)
    print(table(rows))
    if any(row.get("passed") is False for row in rows):
        print("not passed: " + "; ".join(row["figure"] for row in rows if row.get("passed") is False))


if __name__ == "__main__":
    main()
