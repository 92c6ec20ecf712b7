"""Runs the arms of a truth with several seeds in parallel processes, keeps each as a JSON line, and makes ledger rows of such a file.

A module of this folder has `ARMS`, `measure(arm, seed, options)` and `rows(found, header)`; `python -m benchmarks.truths.NAME --model
FOLDER --out FILE` measures, on another machine than this perhaps, and `--from FILE` adds the rows. Every process has the model for itself;
processes share a device, so that seconds mean nothing here.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from hone.feed.load import Batch
from hone.model.hf import Checkpoint
from hone.model.tokenizer import load_tokenizer

Found = dict[str, dict[int, dict[str, float]]]
"""Figures by arm and seed."""


def main(module: ModuleType, name: str, more: Callable[[argparse.ArgumentParser], None] | None = None) -> None:
    """Measures or, with `--from`, adds rows to ledger/`name`.jsonl. `more` adds options of the module."""
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="files", type=Path, nargs="+", help="files of runs: add their rows to the ledger"
    )
    parser.add_argument("--model", type=Path, help="folder with calibration.jsonl.gz and heldout.jsonl.gz in it")
    parser.add_argument("--out", type=Path, help="where runs are kept, a line each")
    parser.add_argument("--arms", nargs="*", help="some of the arms")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="100: a pilot, which chooses sizes and counts nothing"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--commit", help="of the code that ran, where its folder is no checkout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", help="of the model, where its folder there had another one")
    parser.add_argument("--no-ledger", action="store_true")
    for option, value in module.SIZES.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(value), default=value)
    if more is not None:
        more(parser)
    options = parser.parse_args()
    if options.files is None:
        with tempfile.TemporaryDirectory() as scratch:
            options.scratch = Path(scratch)
            measured(module, options)
        return
    parts = [_lines(file) for file in options.files]
    header, lines = parts[0][0], [line for part in parts for line in part[1:]]
    if any(part[0]["sizes"] != header["sizes"] for part in parts):
        parser.error(f"{', '.join(map(str, options.files))} are of different sizes")
    header["model"] = options.name or header["model"]
    rows = module.rows(found_of(lines), header)
    for row in rows:
        print(f"{row['figure']:<110} {row['value']:.4f} {row['unit']}; {row.get('note', '')}")
    if not options.no_ledger:
        ledger.append(name, rows, stamp=header["stamp"])


def measured(module: ModuleType, options: argparse.Namespace) -> None:
    """Runs every arm with every seed, seed by seed, and writes each as it ends."""
    stamp = ledger.stamp_of(options.device)
    if options.commit:
        stamp |= {"commit": options.commit, "dirty": False}
    sizes = {name: getattr(options, name) for name in module.SIZES}
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    tasks = [(module.__name__, arm, seed, options) for seed in seeds for arm in options.arms or module.ARMS]
    for name in ("calibration", "heldout"):
        np.save(options.scratch / f"{name}.npy", _read(options.model, f"{name}.jsonl.gz"))
    multiprocessing.set_forkserver_preload([module.__name__])  # what it imports is imported once
    tasks.sort(key=lambda one: -getattr(module, "COSTS", {}).get(one[1], 0))  # the longest ones first
    with options.out.open("w", encoding="utf8") as file:
        file.write(json.dumps({"stamp": stamp, "sizes": sizes, "model": options.model.name}) + "\n")
        file.flush()
        with multiprocessing.get_context("forkserver").Pool(options.workers) as pool:
            for line in pool.imap_unordered(_one, tasks):
                file.write(json.dumps(line) + "\n")
                file.flush()
                print(json.dumps(line)[:400], flush=True)


def _one(task: tuple[str, str, int, argparse.Namespace]) -> dict[str, Any]:
    import sys

    __import__(task[0])
    torch.set_num_threads(1)
    begun = time.perf_counter()
    line: dict[str, Any] = {"arm": task[1], "seed": task[2]}
    try:
        line |= sys.modules[task[0]].measure(*task[1:])
    except Exception:  # an arm that fails must not lose the others
        return line | {"error": traceback.format_exc()[-1500:]}
    return line | {"s": time.perf_counter() - begun}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Its lines, without a last one that a run was cut in."""
    whole = file.read_text(encoding="utf8").rpartition("\n")[0]
    if not whole:
        raise SystemExit(f"{file} has no run: it was cut before one began")
    return [json.loads(line) for line in whole.splitlines()]


def found_of(lines: Sequence[dict[str, Any]]) -> Found:
    """The lines by arm and seed. Raises SystemExit for one that failed."""
    found: Found = {}
    for line in lines:
        if "error" in line:
            raise SystemExit(f"{line['arm']}, seed {line['seed']} failed: {line['error']}")
        figures = {name: value for name, value in line.items() if name not in ("arm", "seed", "s")}
        found.setdefault(line["arm"], {})[line["seed"]] = figures
    return found


def values_of(found: Found, arm: str, figure: str, *beside: str) -> list[float]:
    """A figure of an arm, in the order of seeds: of those that the arms `beside` have, too."""
    return [found[arm][seed][figure] for seed in seeds_of(found, arm, *beside)]


def seeds_of(found: Found, *arms: str) -> list[int]:
    """The seeds that all `arms` have: a run that was cut has more of some than of others."""
    return sorted(set.intersection(*(set(found.get(arm, {})) for arm in arms)))


def enough(found: Found, *arms: str) -> bool:
    """Whether all `arms` have two seeds in common, without which there is no interval; says so of those that have not."""
    if len(seeds_of(found, *arms)) > 1:
        return True
    print(
        f"no row of {arms[0]}: seeds {seeds_of(found, arms[0])}, {len(seeds_of(found, *arms))} of them beside what it is compared with"
    )
    return False


def dtype_of(options: argparse.Namespace) -> tuple[str, torch.dtype]:
    """Precision of a training and the dtype of a frozen model: bf16 on a GPU."""
    return ("bf16", torch.bfloat16) if options.device.startswith("cuda") else ("fp32", torch.float32)


def tokens_of(options: argparse.Namespace, name: str) -> np.ndarray:
    """The documents of NAME.jsonl.gz beside the model as one stream, each with the end-of-text token."""
    return np.load(options.scratch / f"{name}.npy", mmap_mode="r")  # type: ignore[no-any-return]


def _read(model: Path, name: str) -> np.ndarray:
    tokenizer, parts = load_tokenizer(model), []
    end = Checkpoint(model).config.eos_token_ids[:1]
    with gzip.open(model / name, "rt", encoding="utf8") as file:
        for line in file:
            parts.append(np.asarray([*tokenizer.encode(json.loads(line)["text"]), *end], np.int64))
    return np.concatenate(parts)


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Lets one process at a time pass."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stretch(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    """The `length` tokens from each of `starts` on, as sequences of one document each."""
    rows = np.stack([text[start : start + length + 1] for start in starts])
    return Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), np.zeros((len(rows), length), np.int32))


def drawn(text: np.ndarray, seed: int, step: int, rows: int, length: int) -> Batch:
    """Random stretches: a function of the seed and the step alone, so that all arms of a seed read the same."""
    return stretch(text, np.random.default_rng((seed, step)).integers(0, len(text) - length - 1, rows), length)
