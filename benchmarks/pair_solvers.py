"""Bits by single and by pair losses, and what solvers find of them at equal evaluations: `python -m benchmarks.pair_solvers MODEL TEXT`.

The losses of MODEL's matrices and pairs of matrices are measured on TEXT as the allocation `pairs` does, at `--probe-bits`. First the choice
among `--bits` at a mean of `--mean` bits is made by the exact solver, greedily, at random and by annealing, each with as many evaluations of a
loss as `--evaluations` (greedy: its own). Then a choice of two bits for `--items` matrices, those that lose most, which a simulated
quantum circuit can hold: it beside annealing and random choices with as many evaluations. Then both choices, with and without pairs, are
what the model is rounded to, and its divergence is measured on other sequences.

Rows in ledger/pair_solvers.jsonl: `value` the loss above that of the exact choice, in parts of what the smallest bits lose above it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ledger import append, table
from hone.base.run import Run
from hone.compress import ALLOCATIONS, STEPS
from hone.compress.allocations.probing import _divergence, _hidden
from hone.compress.calibration import Calibration, from_text
from hone.compress.capture import Flow
from hone.compress.engine.job import Job
from hone.compress.targets import matrix_name, select
from hone.model.hf import Checkpoint
from hone.solvers.knapsack import choose
from hone.solvers.pairwise.problem import Pairwise
from hone.solvers.pairwise.qaoa import qaoa
from hone.solvers.pairwise.solvers import anneal, at_random, exact, greedy

SEEDS = 5


def measured(arguments: argparse.Namespace) -> tuple[Job, Calibration, list[str], Pairwise]:
    """The job, sequences to check on, the matrices' names, and the choice."""
    checkpoint = Checkpoint(arguments.model)
    step = STEPS.read({"kind": "rtn", "group_size": arguments.group_size})
    targets = select(checkpoint.config, (r"\.layers\.",), ("lm_head",))
    job = Job(checkpoint, (step,), targets, arguments.device, torch.float32)
    read = from_text(arguments.text, arguments.model, num_sequences=32, seq_len=512, seed=0, num_spare=16)
    flow = Flow(read, 8, arguments.device, torch.float32)
    fields = {"kind": "pairs", "bits_per_weight": arguments.mean, "bits": tuple(arguments.bits)}
    allocation: Any = ALLOCATIONS.read({**fields, "probe_bits": arguments.probe_bits, "probe_sequences": 4})
    began, run = time.monotonic(), Run(quiet=True)
    losses = allocation.losses(job, flow, run)
    pairs = allocation.pairs(losses, job, flow, run)
    print(f"{len(losses)} matrices and {len(pairs)} pairs measured in {time.monotonic() - began:.0f} s", flush=True)
    names, places = list(losses), {name: at for at, name in enumerate(losses)}
    weights = [linear.rows * linear.columns for linears in targets for linear in linears if linear.path != "lm_head"]
    sizes = [[count * bits // 8 for bits in arguments.bits] for count in weights]
    both = {}
    for (one, other), values in pairs.items():
        i, j = places[one], places[other]
        both[min(i, j), max(i, j)] = np.array(values) if i < j else np.array(values).T
    table_of = [[losses[name][bits] for bits in arguments.bits] for name in names]
    spare = read.spare
    assert spare is not None, "the text is too short for other sequences to check on"
    return job, spare, names, Pairwise(sizes, table_of, both, int(arguments.mean * sum(weights) / 8))


def compared(name: str, problem: Pairwise, evaluations: int, seconds: float, *, circuit: bool) -> list[dict[str, Any]]:
    """A row for each solver: mean and half the range of its seeds."""
    best, start = exact(problem, seconds), problem.smallest()
    assert best is not None and start is not None
    least = problem.loss(best.choice)
    room = problem.loss(start) - least
    proven = least - best.bound <= 1e-6 * abs(room)
    said = "proven" if proven else f"no loss is below {best.bound:.5g}"
    rows = [{"figure": f"{name}: exact", "value": 0.0, "unit": "of the range", "n": 1, "note": f"{least:.5g}, {said}"}]
    searches: dict[str, Any] = {"greedy": lambda seed: greedy(problem)}
    if circuit:
        searches["QAOA, 3 layers"] = lambda seed: qaoa(problem, evaluations, seed=seed)
    searches["annealing"] = lambda seed: anneal(problem, evaluations, seed)
    searches["random"] = lambda seed: at_random(problem, evaluations, seed)
    for solver, search in searches.items():
        found, spent = [], []
        for seed in range(1 if solver == "greedy" else SEEDS):
            problem.evaluations = 0
            choice = search(seed)
            spent.append(problem.evaluations)
            found.append((problem.loss(choice) - least) / room)
        row = {"figure": f"{name}: {solver}", "value": float(np.mean(found)), "unit": "of the range", "n": len(found)}
        rows.append({**row, "half_range": (max(found) - min(found)) / 2, "evaluations": int(np.mean(spent))})
    return rows


def smaller(problem: Pairwise, items: int, places: tuple[int, int]) -> Pairwise:
    """Of the `items` items that lose most, with two of their options; the others stay at the greater one of them."""
    loss = np.array([losses[places[0]] for losses in problem.losses])
    kept = sorted(np.argsort(-loss)[:items].tolist())
    rest = [one for one in range(len(problem)) if one not in kept]
    two = list(places)
    singles = [[problem.losses[one][at] for at in two] for one in kept]
    for place, one in enumerate(kept):
        for other in rest:
            table_of = problem.near[one].get(other)
            if table_of is not None:
                for at, option in enumerate(two):
                    singles[place][at] += float(table_of[option, places[1]])
    sizes = [[problem.sizes[one][at] for at in two] for one in kept]
    pairs = {
        (a, b): problem.pairs[kept[a], kept[b]][np.ix_(two, two)]
        for a, b in itertools.combinations(range(items), 2)
        if (kept[a], kept[b]) in problem.pairs
    }
    return Pairwise(sizes, singles, pairs, sum(map(sum, sizes)) // 2)


@torch.no_grad()
def divergence(job: Job, spare: Calibration, names: list[str], choice: list[int], bits: list[int]) -> float:
    """Nats a token of the model whose matrices are rounded so, on `spare`."""
    model = job.checkpoint.build(job.device, job.dtype)
    tokens = torch.from_numpy(spare.tokens).to(job.device)
    reference, step = _hidden(model, tokens), job.steps[0]
    for index, linears in enumerate(job.targets[: job.checkpoint.config.num_layers]):
        for linear in linears:
            module = model.layers[index].get_submodule(linear.path)
            found = bits[choice[names.index(matrix_name(index, linear.path))]]
            module.weight.data = step.model_copy(update={"bits": found}).nearest(module.weight.data)
    return _divergence(model, tokens, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--mean", type=float, default=3.25)
    parser.add_argument("--probe-bits", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--evaluations", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=16)
    parser.add_argument("--circuit-evaluations", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=60.0, help="most of the exact solver")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    job, spare, names, problem = measured(arguments)
    label = f"{arguments.model.name}, {len(names)} matrices, mean {arguments.mean:g} bits"
    rows = compared(label, problem, arguments.evaluations, arguments.seconds, circuit=False)
    places = (0, len(arguments.bits) - 2)
    small = smaller(problem, min(arguments.items, len(names)), places)
    of_two = f"{arguments.bits[places[0]]} or {arguments.bits[places[1]]} bits"
    name = f"{arguments.model.name}, {len(small)} matrices, {of_two}"
    rows += compared(name, small, arguments.circuit_evaluations, arguments.seconds, circuit=True)
    paired, alone = exact(problem, arguments.seconds), choose(problem.sizes, problem.losses, problem.budget)
    assert paired is not None and alone is not None
    for how, choice in (("with pairs", paired.choice), ("without pairs", alone)):
        value = divergence(job, spare, names, choice, arguments.bits)
        row = {"figure": f"{label}: divergence of bits chosen {how}", "value": value, "unit": "nats/token", "n": 16}
        rows.append({**row, "note": f"predicted {problem.loss(choice):.5g}"})
    print(table(rows))
    for row in rows:
        print(row.get("note", ""), row.get("evaluations", ""))
    if not arguments.no_ledger:
        print(append("pair_solvers", rows))


if __name__ == "__main__":
    main()
