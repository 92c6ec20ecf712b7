"""New rows of training, compression and serving beside their predictions, on one machine, after a fresh calibration of it.

    python -m benchmarks.predicted.measured --out DIR                            # one GPU of 80 GB or more, 240 s at most
    python -m benchmarks.predicted.measured --out DIR --ranks 2                  # two GPUs of one host: layouts, 240 s at most
    python -m benchmarks.predicted.measured --out DIR --device cpu               # tiny shapes on this CPU, two minutes
    python -m benchmarks.predictions --take DIR                                  # adds what DIR holds to the ledger, and makes the page

Everything is random: weights, tokens, requests. DIR gets `calibration-ID.json`, the rates that this call measured, and `rows.jsonl`, a row as
soon as it is measured: `value`, `predicted` with these rates, `config`, from which the estimates can be made again, and `calibration`, the ID.
No case is begun once `--seconds` are nearly over. Nothing of the machine is changed: clocks and limits stay as they are.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch

import torch

from benchmarks import compress, ledger
from benchmarks.predicted.estimates import SHAPES, Said, said_of
from benchmarks.ranks import forget
from hone.measure.machine import Machine, describe
from hone.plan.search.executing import serving, training
from hone.plan.search.goal import Requests
from hone.plan.search.recipes import recomputation
from hone.plan.search.serving.formats import FORMATS
from hone.plan.search.shapes import Candidate

ONE = {"tensor": 1, "stages": 1, "context": 1, "sharding": "ddp"}
"""The place of one device on the axes of a training's layout."""

TRAININGS: dict[str, list[dict[str, Any]]] = {
    "cuda": [
        {"shape": "llama3-1b", "batch_size": 8, "seq_len": 2048},
        {"shape": "llama3-8b", "layers": 8, "batch_size": 1, "seq_len": 8192},
        {"shape": "llama3-8b", "layers": 8, "batch_size": 1, "seq_len": 8192, "precision": "fp8"},
        {"shape": "llama3-1b", "batch_size": 16, "seq_len": 2048, "passes": 4},
        {"shape": "llama3-1b", "batch_size": 8, "seq_len": 2048, "recomputation": "full"},
        {"shape": "qwen3-0.6b", "batch_size": 8, "seq_len": 2048},
        {"shape": "llama3-1b", "batch_size": 1, "seq_len": 8192, "precision": "fp8"},
        {"shape": "llama3-8b", "layers": 4, "batch_size": 8, "seq_len": 2048},
        {"shape": "llama3-8b", "layers": 8, "batch_size": 4, "seq_len": 4096, "recomputation": "selective"},
    ],
    "cpu": [
        {"shape": "tiny", "batch_size": 4, "seq_len": 128, "precision": "fp32"},
        {"shape": "tiny", "batch_size": 8, "seq_len": 128, "precision": "fp32", "passes": 2},
    ],
}
"""On one device."""

STEPS = {"cuda": 6, "cpu": 4}

COMPRESSIONS: dict[str, list[dict[str, Any]]] = {
    "cuda": [
        {"shape": "llama3-8b", "steps": [{"kind": kind, "bits": 4, "group_size": 128, "uneven": "nearest"}]}
        for kind in ("rtn", "gptq")
    ] + [
        {"shape": "llama3-8b", "steps": [{"kind": "sparsegpt"}]},
        {"shape": "llama3-8b", "steps": [{"kind": "fp8"}]},
    ],
    "cpu": [{"shape": "tiny", "steps": [{"kind": kind, "bits": 4, "group_size": 32, "uneven": "nearest"}]} for kind in ("rtn", "gptq")],
}  # fmt: skip
"""Of `COMPRESSED` of a shape, beside the calibration's tokens there."""

COMPRESSED = {
    "cuda": {"layers": 2, "num_sequences": 128, "seq_len": 2048},
    "cpu": {"layers": 2, "num_sequences": 8, "seq_len": 64},
}

SERVINGS: dict[str, list[dict[str, Any]]] = {
    "cuda": [
        {"shape": "llama3-8b", "seqs": 64},
        {"shape": "llama3-8b", "seqs": 1},
        {"shape": "qwen3-0.6b", "seqs": 128},
        {"shape": "llama3-8b", "seqs": 64, "format": "fp8"},
        {"shape": "llama3-8b", "seqs": 16, "format": "int4 g128"},
        {"shape": "llama3-1b", "seqs": 64, "format": "int8"},
    ],
    "cpu": [{"shape": "tiny", "seqs": 4}, {"shape": "tiny", "seqs": 1}],
}
"""Closed loops of `seqs` requests at once."""

REQUESTS = {"cuda": (512, 128), "cpu": (32, 16)}
"""Tokens of a prompt and of an output."""

LAYOUTS: dict[str, list[str]] = {
    "dense": ["--layers=8", "--layouts", "ddp", "zero2", "zero3", "tp"],
    "deep": ["--layers=16", "--layouts", "zero2", "zero3"],
    "fp8": ["--layers=16", "--precision=fp8", "--layouts", "zero2"],
    "pipeline": ["--layers=8", "--batch=2", "--seq-len=4096", "--micro-batches=4", "--layouts", "pp-1f1b", "pp-zb_v"],
    "context": ["--layers=8", "--layouts", "cp-ring"],
}
"""Options of benchmarks.train_layouts for two GPUs of 80 GB."""

LAST_S = 20.0
"""No case is begun that could not end within so many seconds."""


class Log:
    """The folder of a call: writes rows as they come, and knows how much time is left."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self._ends = folder, time.perf_counter() + seconds
        self._begun = time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds until the call should have ended."""
        return self._ends - time.perf_counter()

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._begun:6.1f} s  {text}", flush=True)

    def add(self, row: dict[str, Any], stamp: Mapping[str, Any]) -> None:
        """Writes a row to the folder's file at once."""
        self.rows.append(row)
        with open(self.folder / "rows.jsonl", "a", encoding="utf8") as file:
            file.write(json.dumps({**row, **stamp}, ensure_ascii=False) + "\n")
        said = f"predicted {row['predicted']:,.4g}" if row.get("predicted") is not None else "no prediction"
        self.say(f"{row['figure']}: {row['value']:,.4g} {row['unit']}, {said}")


def calibrated(log: Log, device: str, ranks: int) -> tuple[Machine, str]:
    """This machine with rates measured now, and their ID; of several GPUs with the collectives between them."""
    command = [sys.executable, "-m", "hone", "calibrate", f"--device={device}"]
    if ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *start, *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    (log.folder / "calibrate.txt").write_text(done.stdout + done.stderr, encoding="utf8")
    describe.cache_clear()
    machine = describe(device)
    if machine.calibration is None:
        raise SystemExit(f"hone calibrate left no rates, status {done.returncode}:\n{done.stderr[-2000:]}")
    text = machine.calibration.model_dump_json(indent=1)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    kept = log.folder / f"calibration-{name}.json"
    kept.write_text(text + "\n", encoding="utf8")
    log.say(f"calibrated {machine.processor}, {kept.name}; {machine.calibration.doubt or 'nothing else ran'}")
    return machine, name


def candidate_of(room: str, shape: str, layers: int | None, seq_len: int) -> Candidate:
    """A shape of a room as the search's executions take it."""
    found, vocab = SHAPES[room][shape]
    changed: dict[str, Any] = {"max_seq_len": max(found.max_seq_len, seq_len)}
    fields = found.model_copy(update=changed | ({"num_layers": layers} if layers else {}))
    config = fields.config(vocab)
    return Candidate(shape, config.dims(), config, fields.model_dump(mode="json", exclude_defaults=True))


def said_or_none(log: Log, config: Mapping[str, Any], machine: Machine) -> Said | None:
    """The estimates, before anything is measured; None, said once, where they cannot be made."""
    try:
        return said_of(config, machine)
    except Exception as error:
        log.say(f"no prediction of {config}: {type(error).__name__}: {str(error)[:200]}")
        return None


def trained(log: Log, machine: Machine, case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of a training on one device: the median step."""
    kind = machine.device.partition(":")[0]
    config = {"room": "training", "precision": "bf16", **case}
    config["recomputation"] = recomputation(config.get("recomputation", "none"))
    said = said_or_none(log, config, machine)
    at = {**ONE, "batch_size": config["batch_size"], "passes": config.get("passes", 1)}
    at |= {"recomputation": case.get("recomputation", "none"), "precision": config["precision"]}
    candidate = candidate_of("training", config["shape"], config.get("layers"), config["seq_len"])
    found = training.step_seconds(
        candidate, at, seq_len=config["seq_len"], device=machine.device, steps=STEPS[kind], budget_s=12.0
    )
    layers = f", {config['layers']} layers" if config.get("layers") else ""
    what = f"{config['shape']}{layers}, {config['precision']}"
    what += (
        f", {at['batch_size']} x {config['seq_len']}, {at['passes']} micro-batches, recomputation {at['recomputation']}"
    )
    row = {"benchmark": "train", "figure": f"training step, {what}", "unit": "tokens/s", "n": found.num}
    row |= {"value": at["batch_size"] * config["seq_len"] / found.seconds, "config": config}
    if found.peak_bytes is not None:
        row["peak_bytes"] = found.peak_bytes
    if said is not None:
        row |= {"predicted": said.by_unit["tokens/s"], "note": said.formula}
        row["predicted_peak_bytes"] = said.by_unit["B"]
    yield row


def compressed(log: Log, machine: Machine, case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a compression of a random model: seconds a layer of the second of two runs (the first compiles), and bytes."""
    kind = machine.device.partition(":")[0]
    sizes = COMPRESSED[kind]
    dtype = "bfloat16" if kind == "cuda" else "float32"
    config = {"room": "compression", "vocab_size": compress.VOCABULARY, "dtype": dtype, **sizes, **case}
    said = said_or_none(log, config, machine)
    given = {"num_sequences": sizes["num_sequences"], "seq_len": sizes["seq_len"], "device": machine.device}
    arguments = argparse.Namespace(batch_size=4, check_sequences=8, **given)
    step, made = dict(case["steps"][0]), _model(case["shape"], sizes, dtype)
    inputs = compress.Inputs(*made, None, None)
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(2):
            found = compress._measure(step, step["kind"], inputs, Path(scratch), arguments)
    label = f"{case['shape']}, {sizes['layers']} layers, {' + '.join(one['kind'] for one in case['steps'])}, {sizes['num_sequences']} x {sizes['seq_len']} tokens"
    took, peak = found["time_s"], found.get("peak_memory_bytes")
    assert took is not None, "a run has its seconds"
    row = {"benchmark": "compress", "figure": f"seconds a layer ({label})", "unit": "s", "n": 1}
    yield row | {
        "value": took / sizes["layers"],
        "config": config,
        "predicted": said.by_unit["s"] if said is not None else None,
        **({"note": said.formula} if said is not None else {}),
    }
    if kind == "cuda" and peak is not None:
        row = {"benchmark": "compress", "figure": f"peak memory ({label})", "unit": "B", "n": 1}
        yield row | {"value": peak, "config": config, "predicted": said.by_unit["B"] if said is not None else None}


_MADE: dict[str, tuple[Path, Path]] = {}


def _model(shape: str, sizes: Mapping[str, int], dtype: str) -> tuple[Path, Path]:
    """A random model's folder and its data folder, made once."""
    if shape not in _MADE:
        folder = Path(tempfile.mkdtemp(prefix="hone-predicted-"))
        one = compress.SHAPES[shape]
        _MADE[shape] = compress.random_model(
            one, folder, sizes["layers"], sizes["num_sequences"], sizes["seq_len"], getattr(torch, dtype)
        )
    return _MADE[shape]


def served(log: Log, machine: Machine, case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of a closed loop: output tokens a second, with the median time of a token beside it."""
    kind = machine.device.partition(":")[0]
    prompt, output = REQUESTS[kind]
    seqs = case["seqs"]
    engine = {"max_num_seqs": seqs, "max_num_batched_tokens": 8192 if kind == "cuda" else 256}
    engine |= {"max_model_len": prompt + output + 64, "enable_prefix_caching": False}
    format = case.get("format", "16 bit")
    load = {"requests": max(2 * seqs, 2), "prompt_tokens": prompt, "output_tokens": output}
    config = {"room": "serving", "shape": case["shape"], "format": format, "load": load, "engine": engine}
    config["dtype"] = "bfloat16" if kind == "cuda" else "float32"
    said = said_or_none(log, config, machine)
    candidate = candidate_of("serving", case["shape"], None, prompt + output)
    asked = Requests(prompt_tokens=prompt, output_tokens=output)
    found = serving.run(candidate, FORMATS[format], engine, asked, device=machine.device)
    what = f"{case['shape']}, {format}, {seqs} requests at once of {prompt} + {output} tokens"
    row = {"benchmark": "serve", "figure": f"closed loop, {what}", "unit": "output tokens/s", "n": found.num}
    row |= {"value": found.tokens_per_s, "config": config, "tpot_s": found.tpot_s, "ttft_s": found.ttft_s}
    yield row | (
        {"predicted": said.by_unit["output tokens/s"], "note": said.formula}
        if said is not None
        else {"predicted": None}
    )


def on_one(log: Log, device: str) -> None:
    """All cases of one device, in turns of the rooms, so that a call that ends early has rows of each."""
    machine, name = calibrated(log, device, 1)
    kind = device.partition(":")[0]
    stamp = {"calibration": name, **ledger.stamp_of(device)}
    plans = [(trained, TRAININGS[kind]), (compressed, COMPRESSIONS[kind]), (served, SERVINGS[kind])]
    for room, cases in _in_turns(plans):
        if log.left() < LAST_S:
            log.say(f"left out for want of time: {room.__name__} {cases}")
            continue
        try:
            for row in room(log, machine, cases):
                log.add(row, stamp)
        except Exception as error:  # a case that fails must not cost the others
            log.say(f"{room.__name__} {cases}: left out, {type(error).__name__}: {str(error)[:300]}")
            forget(error)
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _in_turns(plans: list[tuple[Any, list[dict[str, Any]]]]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(room, case) of three trainings, a compression and two servings, and so on."""
    left = [(room, list(cases), count) for (room, cases), count in zip(plans, (3, 2, 2), strict=True)]
    while any(cases for _, cases, _ in left):
        for room, cases, count in left:
            for case in cases[:count]:
                yield room, case
            del cases[:count]


def on_ranks(log: Log, ranks: int) -> None:
    """The layouts of `LAYOUTS`, each group a torchrun of benchmarks.train_layouts."""
    from benchmarks.ranks import rows_of

    _, name = calibrated(log, "cuda", ranks)
    stamp = {"calibration": name, **ledger.stamp_of("cuda", ranks)}
    for group, options in LAYOUTS.items():
        if log.left() < 2 * LAST_S:
            log.say(f"left out for want of time: {group}")
            continue
        rows, code = rows_of("train_layouts", ranks, [*options, f"--ranks={ranks}", "--steps=5", "--no-ledger"])
        for row in rows:
            log.add({"benchmark": "train", **row}, stamp)
        if code:
            log.say(f"{group} ended with status {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the rows and the calibration")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs; with several the layouts are timed, else one GPU's cases"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="the call ends about then")
    given = parser.parse_args()
    log = Log(given.out, given.seconds)
    if given.ranks > 1:
        on_ranks(log, given.ranks)
    else:
        on_one(log, given.device)
    log.say(f"{len(log.rows)} rows in {log.folder}")
    for row in log.rows:
        if row.get("predicted"):
            print(
                f"  {row['figure']:<100} {row['value']:>10,.4g} predicted {row['predicted']:>10,.4g} ({row['predicted'] / row['value'] - 1:+.1%})"
            )


if __name__ == "__main__":
    main()
