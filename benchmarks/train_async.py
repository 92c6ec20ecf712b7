"""What a straggler costs synchronous and asynchronous data parallelism: seconds to a target loss on real text, 4 ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.train_async BOOK.txt.gz ... [--steps 64] [--seeds 3]

Bytes of the text are the tokens; the last book is validation only. A step's passes take `--base` seconds on each rank by a sleep, beside
which the tiny model is little, so that four ranks on two cores are four machines; a straggler sleeps `--late` more: 'one', always rank 3;
'any', in each step a rank drawn by the seed. The target is the loss of synchronous training (ddp) after half of the steps, of the same seed.
Measured is the model that rank 0 has every 4 steps, with the time at which it had it, evaluated when all is over. The sleeps are
here alone. Every technique gets the same model, batches a rank, steps and learning rate, which were tuned for none of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.ranks import on_ranks
from benchmarks.stragglers import ends
from benchmarks.train_lossy import SEQ_LEN, VOCAB, bytes_of
from hone.base.ranks import Mesh
from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.model.shape import Shape
from hone.ops import linear_cross_entropy
from hone.train.data_parallel.asynchronous.topology import ring
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.schedules.wsd import WarmupStableDecay

SHAPE = Shape(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96, max_seq_len=SEQ_LEN)
SEQUENCES, LR, EVERY, RANKS = 2, 3e-3, 4, 4
SEVERAL = 8
"""Steps between two averages of local_sgd and diloco."""


class Case(NamedTuple):
    """A technique, and for `ends` the steps by which its reads may miss others, and those between two meetings (0: the last one)."""

    kind: dict[str, Any]
    staleness: float
    sync_every: int = 0
    near: bool = False


CASES = {
    "ddp": Case({"kind": "ddp"}, 0),
    "bsp": Case({"kind": "bsp"}, 0),
    "ssp, staleness 2": Case({"kind": "ssp", "staleness": 2}, 2),
    "ssp, staleness 4": Case({"kind": "ssp", "staleness": 4}, 4),
    "asp": Case({"kind": "asp"}, math.inf),
    "local_sgd": Case({"kind": "local_sgd"}, math.inf, SEVERAL),
    "diloco": Case({"kind": "diloco"}, math.inf, SEVERAL),
    "gossip": Case({"kind": "gossip"}, math.inf, 0, True),
    "ad_psgd": Case({"kind": "ad_psgd"}, math.inf),
}
STRAGGLERS = ("none", "one", "any")


class Run(NamedTuple):
    """What one training of `steps` found on rank 0: every `EVERY` steps the seconds since its start, and the loss then."""

    seconds: list[float]
    losses: list[float]
    predicted: list[float]
    """The seconds by `ends`, from the sleeps alone."""
    staleness: int | None


def main() -> None:
    """Starts the ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    on_ranks("train_async", _arguments(), _work)


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every technique with every straggler and seed; rank 0 writes the rows."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    books = [np.frombuffer(gzip.open(path).read(), np.uint8) for path in arguments.text]
    train, val = np.concatenate(books[:-1]), books[-1]
    found: dict[tuple[str, str], list[Run]] = {}
    names = [name for name in CASES if name in (arguments.only or CASES)]
    with mesh.together():
        for seed in range(arguments.seeds):
            for straggler in STRAGGLERS:
                for name in names:
                    one = _trained(CASES[name], mesh, train, val, seed, straggler, arguments)
                    found.setdefault((name, straggler), []).append(one)
                    if mesh.leads:
                        print(
                            f"seed {seed}, straggler {straggler}: {name} {one.seconds[-1]:.1f} s, loss {one.losses[-1]:.3f}",
                            flush=True,
                        )
            if mesh.leads:
                arguments.out.write_text(json.dumps(_rows(found, arguments)))


def _sleeps(straggler: str, seed: int, arguments: argparse.Namespace) -> np.ndarray:
    """Seconds of each rank's passes in each step, [ranks, steps]."""
    found = np.full((RANKS, arguments.steps), arguments.base)
    if straggler == "one":
        found[RANKS - 1] += arguments.late
    elif straggler == "any":
        slow = np.random.default_rng([seed, 1]).integers(0, RANKS, arguments.steps)
        found[slow, np.arange(arguments.steps)] += arguments.late
    return found


def _trained(
    case: Case, mesh: Mesh, train: np.ndarray, val: np.ndarray, seed: int, straggler: str, arguments: argparse.Namespace
) -> Run:
    steps, sleeps = arguments.steps, _sleeps(straggler, seed, arguments)
    lossy = {} if case.kind["kind"] == "ddp" else {"num_workers": RANKS}
    shared = Parallelism.read({"data_parallel": {**case.kind, **lossy, **_meetings(case, steps)}})
    ranks = shared.ranks(mesh, "cpu")
    model = build(SHAPE.config(VOCAB), seed=seed)
    schedule = WarmupStableDecay(warmup=8, decay=0)
    trainer = shared.data_parallel.trainer()(model, steps=steps, schedule=schedule, optimizer=AdamW(lr=LR), ranks=ranks)
    passes, seconds, kept = trainer.gradients, [], []

    def late(batch: Any) -> Any:
        time.sleep(sleeps[mesh.rank, trainer.done])
        return passes(batch)

    trainer.gradients = late  # type: ignore[method-assign]
    draw = np.random.default_rng([seed, 0])
    starts = draw.integers(0, len(train) - SEQ_LEN - 1, (steps, RANKS, SEQUENCES))
    mesh.gather(None)
    begun = time.perf_counter()
    for step in range(steps):
        trainer.step(bytes_of(train, starts[step, mesh.rank]))
        if mesh.leads and (step + 1) % EVERY == 0:
            seconds.append(time.perf_counter() - begun)
            kept.append({name: one.detach().clone() for name, one in trainer.update.weights.masters.items()})
    mesh.gather(None)
    losses = [_loss(model, one, val) for one in kept]
    peers = (lambda step, worker: [*ring(step, worker, RANKS).sources]) if case.near else None
    every = ends(sleeps.tolist(), case.staleness, sync_every=case.sync_every, peers=peers)
    predicted = every[0][EVERY - 1 :: EVERY]
    if steps % EVERY == 0:  # all meet after the last step, whatever the rule
        predicted[-1] = max(one[-1] for one in every)
    servers = getattr(trainer.update, "servers", None)
    stale = None if servers is None else max(mesh.gather(max(servers.staleness)))
    return Run(seconds, losses, predicted, stale)


def _meetings(case: Case, steps: int) -> dict[str, int]:
    """As few as may be: none before the end where ranks need none."""
    return {} if case.kind["kind"] in ("ddp", "bsp") else {"sync_every": case.sync_every or steps}


@torch.no_grad()
def _loss(model: Decoder, weights: dict[str, torch.Tensor], val: np.ndarray) -> float:
    """Nats a byte of the validation text with `weights` as the model's."""
    named = dict(model.named_parameters())
    for name, one in weights.items():
        named[name].copy_(one.view(named[name].shape))
    batch = bytes_of(val, np.linspace(0, len(val) - SEQ_LEN - 1, 48).astype(np.int64))
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    x = model.head_input(model.hidden(tokens, Causal(tokens)))
    return float(linear_cross_entropy(x, model.head_weight, targets))


def _reached(run: Run, target: float) -> int | None:
    """At which of the kept models the target was reached."""
    return next((at for at, loss in enumerate(run.losses) if loss <= target), None)


def _rows(found: dict[tuple[str, str], list[Run]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each technique and straggler: mean seconds to the target, beside ddp's with the same straggler."""
    half = arguments.steps // EVERY // 2 - 1
    targets = [one.losses[half] for one in found["ddp", "none"]]
    params, rows = SHAPE.config(VOCAB).num_params, []
    what = f"{params:,} weights on {RANKS} ranks, passes of {arguments.base:g} s"
    took: dict[tuple[str, str], list[float]] = {}
    for (name, straggler), runs in found.items():
        places = [_reached(run, target) for run, target in zip(runs, targets, strict=True)]
        said = {"none": "no straggler", "one": "one rank always", "any": "one rank at a time"}[straggler]
        late = "" if straggler == "none" else f" {arguments.late:g} s late"
        row: dict[str, Any] = {
            "figure": f"{what}, {said}{late}: {name}, time to ddp's loss after {arguments.steps // 2} steps",
            "unit": "s",
        }
        ratio = statistics.mean(run.seconds[-1] / run.predicted[-1] for run in runs)
        note = f"rank 0's {arguments.steps} steps took {statistics.mean(run.seconds[-1] for run in runs):.1f} s, {ratio:.2f} times what the sleeps make"
        note += f"; loss then {statistics.mean(run.losses[-1] for run in runs):.3f}"
        if runs[0].staleness is not None:
            note += f"; reads were behind by at most {max(run.staleness or 0 for run in runs)} steps"
        if arguments.note:
            note += f"; {arguments.note}"
        if None in places:
            row |= {"value": None, "note": f"not reached with {places.count(None)} of {len(runs)} seeds; {note}"}
        else:
            took[name, straggler] = [
                run.seconds[place] for run, place in zip(runs, places, strict=True) if place is not None
            ]
            steps = ", ".join(str((place + 1) * EVERY) for place in places if place is not None)
            predicted = statistics.mean(
                run.predicted[place] for run, place in zip(runs, places, strict=True) if place is not None
            )
            row |= {
                "value": statistics.mean(took[name, straggler]),
                "note": f"{predicted:.2f} s by the sleeps alone; after steps {steps}; {note}",
            }
            if name != "ddp" and ("ddp", straggler) in took:
                peer = statistics.mean(took["ddp", straggler])
                row |= {"peer": "ddp", "peer_value": peer, "ratio": row["value"] / peer}
            if straggler == "any" and name != "ddp":
                row["technique"] = f"data parallelism/{CASES[name].kind['kind']}"
        rows.append({**row, "n": len(runs)})
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="gzipped texts, at least two; the last one is for validation")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--base", type=float, default=0.05, help="seconds of a rank's passes")
    parser.add_argument("--late", type=float, default=0.2, help="seconds that a straggler's take longer")
    parser.add_argument("--only", nargs="*", choices=[*CASES], help="techniques; ddp must be one of them")
    parser.add_argument("--note", default="", help="what the rows say of the machine")
    parser.add_argument("--no-ledger", action="store_true", help="only prints the table")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(ranks=RANKS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
