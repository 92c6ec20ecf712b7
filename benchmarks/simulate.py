"""A simulated serving run beside the same requests on the real engine, on this CPU.

python -m benchmarks.simulate MODEL_FOLDER [--rate 2] [--requests 60] [--no-ledger]

Run it on an idle machine: it calibrates first, and other work slows the real run alone. Rows go to benchmarks/ledger/simulate.jsonl,
the real engine as the peer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from benchmarks.ledger import append, table
from hone.measure.calibrate import calibrate_all
from hone.measure.machine import describe
from hone.model.facts import CheckpointFacts
from hone.plan.simulate.opening import open_simulation
from hone.plan.simulate.run import simulate
from hone.plan.simulate.traces import Trace, synthetic
from hone.serve.engine import Engine
from hone.serve.request import Request, SamplingParams
from hone.serve.spec import EngineSpec

SPEC = EngineSpec(max_num_seqs=8, num_pages=400, max_num_batched_tokens=256, num_threads=1, dtype="float32")


def measured(folder: Path, trace: Trace) -> list[tuple[float, float, float]]:
    """(arrival, first token, last token) of every request on the real engine, seconds since its start."""
    engine = Engine(folder, SPEC)
    engine.generate([[5] * 20], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    engine.pool.clear()
    vocabulary = engine.model.config.vocab_size
    times = [[one.time_s, 0.0, 0.0] for one in trace.arrivals]
    todo, start = list(enumerate(trace.arrivals)), time.perf_counter()
    while todo or engine.has_work:
        while todo and todo[0][1].time_s <= time.perf_counter() - start:
            number, one = todo.pop(0)
            prompt = [(number * 37 + place * 11) % vocabulary for place in range(one.prompt_tokens)]
            params = SamplingParams(max_tokens=one.output_tokens, temperature=0, ignore_eos=True)
            engine.add(Request(str(number), prompt, params))
        if not engine.has_work:
            time.sleep(1e-3)
            continue
        for output in engine.step():
            row, now = times[int(output.request_id)], time.perf_counter() - start
            row[1] = row[1] or now
            row[2] = now
    return [(first, second, third) for first, second, third in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    machine = describe("cpu").model_copy(update={"calibration": calibrate_all("cpu", ["float32"])})
    trace = synthetic("poisson", arguments.rate, arguments.requests, (20, 80), (16, 48), seed=1)
    opened = open_simulation(SPEC, CheckpointFacts.of(arguments.model), machine)
    run = simulate(trace, opened.sizes, opened.steps)
    real = measured(arguments.model, trace)
    outputs = [one.output_tokens for one in trace.arrivals]
    tokens = sum(outputs)
    pairs = {
        "ttft_p50": ([one.ttft_s for one in run.served], [first - came for came, first, _ in real]),
        "tpot_p50": (
            [one.tpot_s for one in run.served],
            [(last - first) / (count - 1) for (_, first, last), count in zip(real, outputs, strict=True)],
        ),
    }
    rows = [
        {"figure": f"simulated {name}", "value": float(np.median(ours)), "unit": "s", "n": len(real), "peer": "the real engine",
         "peer_value": float(np.median(theirs)), "ratio": float(np.median(ours) / np.median(theirs))}
        for name, (ours, theirs) in pairs.items()
    ]  # fmt: skip
    ours_s, theirs_s = tokens / run.end_s, tokens / max(last for *_, last in real)
    rows.append(
        {"figure": "simulated output tokens/s", "value": ours_s, "unit": "tokens/s", "n": len(real), "peer": "the real engine",
         "peer_value": theirs_s, "ratio": ours_s / theirs_s}
    )  # fmt: skip
    print(table(rows))
    if not arguments.no_ledger:
        append("simulate", rows)


if __name__ == "__main__":
    main()
