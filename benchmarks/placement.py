"""What placement on NUMA nodes gains: STREAM, a data stage and CPU decoding, bound and unbound in turn (ABAB).

    python -m benchmarks.placement [--model=FOLDER] [--text=FILE] [--out=FILE.jsonl] [--rounds=4] [--anyway]

On a machine with one NUMA node there is nothing to place, which is said; --anyway measures what binding costs there. Each arm is a
process of its own, so that no page and no thread of the other arm is left. `ratio` is unbound seconds over bound ones: above 1 is a gain.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hone.measure.topology.pin import SETTING
from hone.measure.topology.read import read_topology

STREAM = """
import sys, time, numpy as np
from hone.measure.probe import kernels
from hone.measure.probe.threads import in_order, on_thread, together
from hone.measure.topology.read import read_topology
topology, bound = read_topology(), sys.argv[1] == "auto"
cpus = in_order(topology)[: topology.num_usable]
length = (256 << 20) // 8 // len(cpus)
def arrays(): return [np.ones(length) for _ in range(3)]
# Unbound: one thread makes all arrays, as a program that loads first and computes later does.
made = [] if bound else on_thread(cpus[0], lambda: [arrays() for _ in cpus])
took = together(cpus, lambda place: arrays() if bound else made[place], lambda a: kernels.triad(*a, 3.0), 5)
print(sorted(took)[2])
"""

DECODE = """
import sys, time
from hone import Engine
from hone.serve.request import SamplingParams
engine = Engine(sys.argv[2], tensor_parallel_size=int(sys.argv[3]))
params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
engine.generate(["The"], params)
begun = time.perf_counter()
engine.generate(["The"] * 4, params)
print(time.perf_counter() - begun)
engine.close()
"""


def arm(binding: str, code: str, *arguments: str) -> float:
    """Seconds that `code` prints, in a process with this binding."""
    command = [sys.executable, "-c", code, binding, *arguments]
    done = subprocess.run(command, env={**os.environ, SETTING: binding}, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def curate(binding: str, source: Path, folder: Path) -> float:
    """Seconds of a data stage on all cores."""
    out = folder / f"data-{binding}"
    shutil.rmtree(out, ignore_errors=True)
    begun = time.perf_counter()
    command = [sys.executable, "-m", "hone", "data", str(source), f"--out={out}", "--executor=processes", "--quiet"]
    subprocess.run([*command, f"--numa_binding={binding}"], check=True, capture_output=True)
    return time.perf_counter() - begun


def main(arguments: list[str]) -> None:
    given = dict(one.lstrip("-").partition("=")[::2] for one in arguments)
    topology = read_topology()
    nodes = len(topology.compute_nodes)
    if nodes < 2 and "anyway" not in given:
        print(f"one NUMA node ({len(topology.cpus)} logical processors): nothing to place, nothing to gain")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        works = {"STREAM triad, all threads": lambda binding: arm(binding, STREAM)}
        if "text" in given:
            works["data stage, a process a core"] = lambda binding: curate(binding, Path(given["text"]), folder)
        if "model" in given:
            for ranks in sorted({1, max(nodes, 1)}):
                words = f"decoding on {ranks} ranks"
                works[words] = lambda binding, n=ranks: arm(binding, DECODE, given["model"], str(n))
        rows = []
        for what, work in works.items():
            seconds: dict[str, list[float]] = {"none": [], "auto": []}
            for _ in range(int(given.get("rounds", 4))):
                for binding, found in seconds.items():
                    found.append(work(binding))
            none, auto = (statistics.median(found) for found in seconds.values())
            rows.append({"figure": what, "nodes": nodes, "none_s": none, "auto_s": auto, "ratio": none / auto, "n": len(seconds["none"]), "all": seconds})  # fmt: skip
            print(f"{what}: unbound {none:.3f} s, bound {auto:.3f} s, {none / auto:.2f} x")
    if "out" in given:
        Path(given["out"]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


if __name__ == "__main__":
    main(sys.argv[1:])
