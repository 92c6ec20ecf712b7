"""A search's predictions beside what its configurations take on this machine, ten of them really run: `python -m benchmarks.plan_executed`.

    python -m benchmarks.plan_executed --goal train                                        # a tiny model on this CPU, some minutes
    python -m benchmarks.plan_executed --goal train --device cuda --shape llama3-1b        # one GPU, about 100 s
    python -m benchmarks.plan_executed --goal serve --device cuda --shape llama3-1b        # one GPU, about 150 s

The candidates are the five that the search ranks first and five more at equal distances down its ranking. Each runs on its own, on random
tokens with random weights; a training has real steps (forward, backward, AdamW), a server real requests, on a GPU those that it has served
once before. Rows say: the measured seconds of the first choice over those of the best that ran (1.00: the search was right), the median error of all
predictions, and the same after one correction from the three first. `--lines FILE` gets a line for each candidate as soon as it has run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch

from benchmarks.ledger import append, table
from benchmarks.serve import SHAPES
from hone.base.errors import HoneError
from hone.base.run import Run
from hone.cli.options import calibrated, circumstances, kernels_of
from hone.measure.calibrate import calibrate_all
from hone.measure.machine import machine_of
from hone.plan.search.exact import Refused, simulated
from hone.plan.search.executing import serving, training
from hone.plan.search.executing.refit import Pair, corrected, factors, kinds_of, seconds_of
from hone.plan.search.goal import Goal
from hone.plan.search.searching import fleets_of, in_order, priced
from hone.plan.search.ways import Way

FIRST = 3
"""Measurements from which the others' predictions are corrected."""

LEAST = 5
"""Candidates that must have run before a first choice is compared with the best of them."""

TRAIN: dict[str, dict[str, Any]] = {
    "cpu": {"batch_size": [8], "seq_len": 128, "tokens": ["1M"], "space": {"micro_batch": [1, 2, 4, 8]}},
    "cuda": {
        "batch_size": [16], "seq_len": 2048, "tokens": ["1B"],
        "space": {"micro_batch": [2, 4, 8, 16], "recomputation": ["none", "selective", "every_nth 2", "full"], "precision": ["bf16", "fp8"]},
    },
}  # fmt: skip
SERVE: dict[str, dict[str, Any]] = {
    "cpu": {
        "requests": {"prompt_tokens": 32, "output_tokens": 16, "tokens": "1M"},
        "space": {"max_num_seqs": [1, 4, 8], "max_num_batched_tokens": [64, 256], "formats": ["16 bit", "int8", "int4 g32"]},
    },
    "cuda": {
        "requests": {"prompt_tokens": 512, "output_tokens": 128, "tokens": "1B"},
        "space": {"max_num_seqs": [16, 64, 256], "max_num_batched_tokens": [2048, 8192], "formats": ["16 bit", "fp8", "int8", "int4 g128"], "kv_cache_dtype": ["auto"]},
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", choices=("train", "serve"), default="train")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--candidates", type=int, default=10)
    parser.add_argument(
        "--rounds", type=int, default=1, help="each candidate runs so often, in turn; the fastest run counts"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of a training after two warm ones")
    parser.add_argument("--seconds", type=float, default=150.0, help="no further candidate is begun after so long")
    parser.add_argument("--lines", default="", help="file that gets a line for each candidate when it has run")
    parser.add_argument("--dry", action="store_true", help="no rows in the ledger")
    args = parser.parse_args()
    begun = time.perf_counter()
    run = rated(circumstances({"device": args.device, "quiet": "true"}), args.goal)
    print(f"calibrated, {time.perf_counter() - begun:.0f} s so far", flush=True)
    goal = goal_of(args)
    ways, _ = priced(goal, fleets_of(goal, run.device, machine_of(run)))
    picked = candidates(in_order(exact(ways, goal), goal), args.candidates)
    print(f"{len(ways)} ways, {len(picked)} to run, {time.perf_counter() - begun:.0f} s so far", flush=True)
    pairs = measured(picked, goal, args, begun)
    print(f"{len(pairs)} of {len(picked)} candidates ran", flush=True)
    if len(pairs) < LEAST or 0 not in pairs:
        raise SystemExit(
            f"no rows: they need {LEAST} candidates that ran, the first choice among them; --seconds, --candidates give more"
        )
    rows = rows_of(picked, pairs, args)
    print(table(rows))
    for row in rows:
        print(f"{row['figure']}: {row['note']}")
    if not args.dry:
        append("plan_executed", rows, args.device)


def rated(run: Run, goal: str) -> Run:
    """`run` with this machine's calibration; for a server's goal on a GPU of the one dtype that it serves."""
    if goal == "train" or run.device == "cpu":
        return calibrated(run)
    machine = machine_of(run)
    measured = calibrate_all(run.device, ["bfloat16"], machine.calibration, kernels=kernels_of(run.device))
    run.machine = machine.model_copy(update={"calibration": measured}).model_dump(mode="json")
    return run


def goal_of(args: argparse.Namespace) -> Goal:
    """The goal of a benchmark: one model, this machine."""
    shape, vocab = SHAPES[args.shape]
    kind = "cuda" if args.device.startswith("cuda") else "cpu"
    sizes = shape.model_dump(mode="json", exclude_defaults=True)
    more = (TRAIN if args.goal == "train" else SERVE)[kind]
    what = "train" if args.goal == "train" else "compress+serve"
    return Goal.read({"goal": what, "model": sizes, "vocab_size": vocab, "weights": {"hours": 1.0}, **more})


def exact(ways: list[Way], goal: Goal) -> list[Way]:
    """The ways that their stages plan, with the seconds of these plans."""
    found = []
    for way in ways:
        try:
            found.append(simulated(way, goal))
        except Refused as refused:
            print(f"{way.label()}: {refused.what}")
    return found


def candidates(ways: list[Way], count: int) -> list[Way]:
    """The first half of `count` by rank, and as many at equal distances down the ranking."""
    if len(ways) <= count:
        return ways
    first = count - count // 2
    rest, step = ways[first:], (len(ways) - first) / (count - first)
    return [*ways[:first], *(rest[int((number + 1) * step) - 1] for number in range(count - first))]


def measured(ways: list[Way], goal: Goal, args: argparse.Namespace, begun: float) -> dict[int, Pair]:
    """What was predicted of each way beside the fastest of its runs; those for which no time is left are missing."""
    found: dict[int, list[float]] = {}
    models = serving.Models(args.device)
    for turn in range(args.rounds):
        for place, way in enumerate(ways):
            if time.perf_counter() - begun > args.seconds and place not in found:
                continue
            try:
                took, told = once(way, goal, args, models)
            except HoneError as error:
                print(f"{way.label()}: {error.what[:200]}", flush=True)
                continue
            found.setdefault(place, []).append(took)
            spent = time.perf_counter() - begun
            line = {"rank": place, "way": way.label(), "predicted_s": seconds_of(way), "measured_s": took, **told}
            more = ", ".join(f"{name} {value:.4g}" for name, value in told.items())
            print(
                f"{turn}  {way.label():60} predicted {seconds_of(way):.4g} s, took {took:.4g} s; {more}; {spent:.0f} s so far",
                flush=True,
            )
            if args.lines:
                with Path(args.lines).open("a", encoding="utf8") as file:
                    file.write(json.dumps({"turn": turn, **line, "spent_s": spent}) + "\n")
    return {
        place: Pair(kinds_of(ways[place])[0], seconds_of(ways[place]), min(times)) for place, times in found.items()
    }


def once(way: Way, goal: Goal, args: argparse.Namespace, models: serving.Models) -> tuple[float, dict[str, float]]:
    """Seconds of a step (the fastest), or of an output token of all sequences together; and what else the run says."""
    if way.engine is not None:
        assert way.format is not None, "a way that serves has a format"
        sizes = {"device": args.device, "models": models}
        served = serving.run(way.candidate, way.format, way.engine, goal.requests, **sizes)
        told = served._asdict()
        return 1 / told.pop("tokens_per_s"), told
    assert way.train is not None, "a way trains or serves"
    more = {"seq_len": goal.seq_len, "device": args.device, "steps": args.steps, "budget_s": 60.0}
    took = training.step_seconds(way.candidate, way.train, **more)
    return took.fastest_s, {"median_s": took.seconds, "steps": float(took.num)}


def rows_of(ways: list[Way], pairs: dict[int, Pair], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The ledger's rows of a run."""
    assert 0 in pairs, "the first choice ran"
    best = min(pairs, key=lambda place: pairs[place].measured)
    regret = pairs[0].measured / pairs[best].measured
    by = factors({place: pairs[place] for place in list(pairs)[:FIRST]}, ways)
    later = {place: pairs[place].measured / seconds_of(corrected(ways[place], by)) for place in pairs}
    again = min(
        pairs,
        key=lambda place: (
            pairs[place].measured if place in list(pairs)[:FIRST] else seconds_of(corrected(ways[place], by))
        ),
    )

    def errors(ratios: Any) -> list[float]:
        return sorted(abs(1 / one - 1) for one in ratios)

    before, after = (
        errors(one.ratio for one in pairs.values()),
        errors(ratio for place, ratio in later.items() if place not in list(pairs)[:FIRST]),
    )
    what = f"{args.goal} goal, {args.shape}, {len(pairs)} configurations run"
    unit, common = "", {"n": len(pairs)}
    told = "; ".join(
        f"{ways[place].label()}: {pair.predicted:.4g} s predicted, {pair.measured:.4g} s"
        for place, pair in pairs.items()
    )
    return [
        {"figure": f"{what}: first choice over the best", "value": regret, "unit": unit, **common, "note": f"first {ways[0].label()}, best {ways[best].label()}"},
        {"figure": f"{what}: choice after {FIRST} runs over the best", "value": pairs[again].measured / pairs[best].measured, "unit": unit, **common, "note": f"chosen {ways[again].label()}"},
        {"figure": f"{what}: median error of predictions", "value": statistics.median(before), "unit": "fraction", **common, "note": told},
        {"figure": f"{what}: median error after {FIRST} runs, of the others", "value": statistics.median(after) if after else None, "unit": "fraction", **common, "note": f"corrected by {', '.join(f'{kind} {factor:.3f}' for kind, factor in by.items())}"},
    ]  # fmt: skip


if __name__ == "__main__":
    main()
