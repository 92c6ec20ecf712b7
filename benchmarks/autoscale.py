"""Autoscaling policies and fixed fleets on published traces: requests answered in time, GPU hours, cold starts, waiting.

    python -m benchmarks.autoscale AzureLLMInferenceTrace_conv.csv --share=0.2 --keep=.autoscale.jsonl
    python -m benchmarks.autoscale AzureLLMInferenceTrace_code.csv --share=0.4 --keep=.autoscale.jsonl
    python -m benchmarks.autoscale_page .autoscale.jsonl

Simulates every policy and seed that the file does not have yet; a seed keeps another random part of the trace's requests, the
same for every policy. The page's command adds rows to benchmarks/ledger/autoscale.jsonl and writes docs/simulation.md's table and picture.
The traces are Azure/AzurePublicDataset's of 2023 (CC-BY; Patel et al. 2024, arXiv:2311.18677).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hone.model.facts import CheckpointFacts
from hone.plan.simulate.elastic import Elasticity, Scaling
from hone.plan.simulate.figures import Goal, figures
from hone.plan.simulate.goodput import goodput
from hone.plan.simulate.opening import Opened, machine_named, open_simulation
from hone.plan.simulate.run import Conduct, fitting, simulate
from hone.plan.simulate.trace_files import read_trace
from hone.plan.simulate.traces import Trace
from hone.serve import AUTOSCALERS
from hone.serve.spec import EngineSpec

GPU = "L40S"
STEP_FACTOR = 1.3
"""On predicted step times, which are limits of the hardware on a GPU known by its data sheet."""
GOAL = Goal(ttft_s=2.0, tpot_s=0.1)
SEQS = 8
"""Requests that a replica runs at once: with more, one long prompt holds up too many answers."""
START_S = 120.0
INTERVAL_S = 5.0
MOST = 12
WARM = 3
"""Loaded replicas that wait in one more run of `panic_window`."""
REQUESTS = 300
"""Of the runs that find one replica's goodput."""
QWEN_14B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
"""The shape of Qwen2.5-14B: 28 GB of weights on a GPU of 48 GB."""


def opened() -> Opened:
    """The engine that every replica is."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN_14B), encoding="utf8")
        spec = EngineSpec(max_num_seqs=SEQS, max_model_len=16384)
        return open_simulation(spec, CheckpointFacts.of(Path(folder)), machine_named(GPU), step_factor=STEP_FACTOR)


def policies(rate: float) -> dict[str, dict[str, Any]]:
    """The fields of each policy where one replica serves `rate` requests/s in time and runs SEQS at once; the rest is its default."""
    most: dict[str, Any] = {"min_replicas": 1, "max_replicas": MOST}
    return {
        "doubling": {"target": SEQS, **most},
        "target_tracking": {"target": 0.7 * SEQS, **most},
        "panic_window": {"target": SEQS, **most},
        "predictive": {"rate_per_replica": rate, "horizon_s": START_S, "in_time": SEQS, **most},
        "hysteresis": {"high": 0.8 * SEQS, "low": 0.5 * SEQS, **most},
    }


def rates(trace: Trace, bin_s: float = 60.0) -> list[float]:
    """Requests/s of every whole minute."""
    times = [one.time_s for one in trace.arrivals]
    counts, _ = np.histogram(times, bins=np.arange(0.0, times[-1] - times[0] + 1e-9, bin_s))
    return [float(count) / bin_s for count in counts]


def one_replica(engine: Opened, trace: Trace) -> float:
    """Requests/s that one replica serves so that 90 % of them are in time: the goodput of a Poisson process of the trace's lengths."""
    random = np.random.Generator(np.random.Philox(1))
    picked = random.choice(len(trace.arrivals), REQUESTS)
    gaps = np.cumsum(random.exponential(1.0, REQUESTS))

    def at(rate: float) -> Trace:
        rows = (replace(trace.arrivals[place], time_s=gap / rate) for place, gap in zip(picked, gaps, strict=True))
        return Trace(tuple(rows), trace.source)

    return goodput(at, engine.sizes, engine.steps, GOAL, start=0.5, tolerance=0.05).rate


def outcome(
    engine: Opened, trace: Trace, fields: dict[str, Any] | None, replicas: int, warm: int = 0
) -> dict[str, Any]:
    """The figures of one run; `fields` of a policy, None: as many replicas all the time. `warm` loaded replicas wait."""
    scaling, conduct = None, Conduct(replicas=replicas)
    if fields is not None:
        scaling = Scaling(Elasticity(AUTOSCALERS.read(fields), INTERVAL_S, START_S, warm))
        conduct = Conduct(scaling.begin, came=scaling.came, replicas=replicas, most=max(scaling.most, replicas))
    run = simulate(trace, engine.sizes, engine.steps, conduct)
    found = {one.name: one.value for one in figures(run, GOAL, bound=engine.steps.bound)}
    if scaling is not None:
        found |= {one.name: one.value for one in scaling.figures(run.fleet, run.end_s)}  # with the warm pool's hours
    met = sum(map(GOAL.met, run.served))
    more = [] if scaling is None else [(one.time_s, one.replicas, one.ready) for one in scaling.moments]
    return {
        "attainment": met / len(run.served),
        "goodput": met / run.end_s,
        "gpu_hours": found["replica_hours"],
        "cold_starts": 0 if scaling is None else scaling.started,
        "drained": 0 if scaling is None else scaling.drained,
        "most": replicas if scaling is None else max(ready for _, _, ready in more),
        "queue_p99_s": found["queue_p99_s"],
        "ttft_p99_s": found["ttft_p99_s"],
        "tpot_p99_s": found["tpot_p99_s"],
        "met_per_gpu_hour": met / found["replica_hours"],
        "moments": more,
    }


def run(path: Path, keep: Path, share: float, seeds: int, rate: float | None) -> None:
    """Simulates what `keep` lacks, one line a run."""
    engine, whole = opened(), read_trace(path)
    whole, left_out = fitting(whole, engine.sizes)
    done = [json.loads(line) for line in keep.read_text(encoding="utf8").splitlines()] if keep.exists() else []
    known = {(row["trace"], row["policy"], row["seed"]): row for row in done}
    first = next((row for row in done if row["trace"] == whole.source), None)
    rate = first["rate_per_replica"] if first else rate or one_replica(engine, whole)
    for seed in range(seeds):
        trace = whole.thinned(share * whole.rate, seed).first(0) if share < 1 else whole
        mean, peak = (max(1, math.ceil(number / rate)) for number in (trace.rate, max(rates(trace))))
        arms: dict[str, tuple[dict[str, Any] | None, int]] = {
            "fixed, for the mean": (None, mean),
            "fixed, for the peak": (None, peak),
        }
        arms |= {name: ({"kind": name, **fields}, mean) for name, fields in policies(rate).items()}
        arms[f"panic_window, {WARM} warm"] = arms["panic_window"]
        for name, (fields, replicas) in arms.items():
            warm = WARM if name.endswith("warm") else 0
            if (whole.source, name, seed) in known:
                continue
            begin = time.perf_counter()
            row = {
                "trace": whole.source, "policy": name, "seed": seed, "share": share, "requests": len(trace.arrivals), "left_out": left_out,
                "rate": trace.rate, "rates": rates(trace), "burstiness": trace.burstiness, "rate_per_replica": rate, "begin": replicas,
                **outcome(engine, trace, fields, replicas, warm), "took_s": time.perf_counter() - begin,
            }  # fmt: skip
            with keep.open("a", encoding="utf8") as file:
                file.write(json.dumps(row) + "\n")
            shown = {key: round(value, 4) for key, value in row.items() if isinstance(value, float)}
            print(whole.source, seed, name, replicas, shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="Part of the requests that a seed keeps.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rate", type=float, help="Requests/s that one replica serves in time; without it, bisected first."
    )
    parser.add_argument("--keep", type=Path, default=Path(".autoscale.jsonl"))
    given = parser.parse_args()
    run(given.trace, given.keep, given.share, given.seeds, given.rate)


if __name__ == "__main__":
    main()
