"""A mixture of experts against its dense twin of as many FLOPs a token, from scratch and upcycled from the twin's own checkpoint at half of its steps.

    python -m benchmarks.moe_twin --data FOLDER_OR_TAR_XZ --out OUT --minutes 8    # on the machine with a GPU; writes OUT/result.json
    python -m benchmarks.moe_twin --page OUT/result.json                           # here: the table of docs/moe.md, benchmarks/ledger/moe_twin.jsonl
    python -m benchmarks.moe_twin --data FOLDER --out OUT --minutes 1 --scratch --first-seed 1 --seeds 1    # one seed, nothing upcycled
    python -m benchmarks.moe_twin --page OUT0/result.json --and OUT1/result.json   # of such runs of several processes: another table
    python -m benchmarks.moe_twin --data FOLDER --out OUT --small                  # the same on a CPU in seconds: nothing of it is a figure

`--data` is a finished data stage, or an archive of its folder `tokens` alone (`tar c tokens | xz`). Every arm of a seed reads the same
sequences in the same order with the same learning rate, up to its decay; the upcycled ones read those of the second half, after a
warm-up of their own, since their optimizer begins without state. A few steps of each model say how many fit into the minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ledger
from hone.base.durable import write_atomic
from hone.base.interval import paired
from hone.feed.load import PackedTokens
from hone.model.decoder import Decoder, build
from hone.model.growth import GROWTHS
from hone.model.growth.base import grown_checkpoint
from hone.model.hf import Checkpoint, save
from hone.model.shape import Shape
from hone.train.loop import Trainer
from hone.train.objectives.preference.measure import validate
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.wsd import WarmupStableDecay

PAGE = Path(__file__).resolve().parent.parent / "docs" / "moe.md"
BEGIN, END = "<!-- moe_twin: written by `python -m benchmarks.moe_twin --page` -->\n", "<!-- end -->"
SCRATCH_BEGIN = "<!-- moe_twin from scratch: written by `python -m benchmarks.moe_twin --page` -->\n"
SIZES: dict[str, int] = {
    "hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 1536,
    "num_experts": 12, "granularity": 2, "seq_len": 512, "batch_size": 64, "val_sequences": 1024,
}  # fmt: skip
SMALL: dict[str, int] = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64,
    "num_experts": 8, "granularity": 2, "seq_len": 32, "batch_size": 8, "val_sequences": 8,
}  # fmt: skip
BALANCE = ({"kind": "aux_loss", "weight": 0.01},)
DENSE, SCRATCH, UPCYCLED, DROPPED = "dense", "moe", "upcycled", "upcycled, half drawn anew"
TRIAL_STEPS, DECAY, LAST = 12, 0.2, 20


class Twins:
    """The models of one comparison, the data, and the result, which is written after every run."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.begun = options, folder, time.monotonic()
        self.device = options.device
        self.sizes: dict[str, int] = {name: getattr(options, name) for name in SIZES}
        self.train, self.val = (PackedTokens(options.data, split) for split in ("train", "val"))
        self.shapes = {DENSE: self._shape("llama"), SCRATCH: self._shape("mixtral", self._experts())}
        self.configs = {
            name: one.config(self.train.vocab_size, eos=self.train.eos_token_id) for name, one in self.shapes.items()
        }
        self.steps, self.runs = options.steps, list[dict[str, Any]]()

    @property
    def router(self) -> dict[str, Any]:
        """A token visits one copy's worth of experts, which compute as much as the dense feed-forward."""
        return {"kind": "softmax", "top_k": self.sizes["granularity"]}

    def _experts(self) -> dict[str, Any]:
        width = self.sizes["intermediate_size"] // self.sizes["granularity"]
        moe = {"kind": "moe", "num_experts": self.sizes["num_experts"], "intermediate_size": width}
        return moe | {"router": self.router, "balance": BALANCE}

    def _shape(self, family: str, *feed_forward: dict[str, Any]) -> Shape:
        names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")
        return Shape(
            family=family,
            max_seq_len=self.sizes["seq_len"],
            feed_forward=feed_forward,
            **{name: self.sizes[name] for name in names},
        )

    def upcycle(self, folder: Path, reinitialize: float, seed: int) -> Decoder:
        """The dense model in `folder` with experts."""
        spec = {"kind": "upcycle", "router": self.router, "balance": BALANCE, "reinitialize": reinitialize}
        spec |= {name: self.sizes[name] for name in ("num_experts", "granularity")}
        return grown_checkpoint(Checkpoint(folder), [GROWTHS.read(spec)], seed).build(self.device, torch.float32)

    def made(self, name: str, seed: int) -> Decoder:
        """A model from scratch."""
        return build(self.configs[name], device=self.device, seed=seed)

    def trainer(self, model: Decoder, steps: int, decay: int, warmup: int) -> Trainer:
        schedule = WarmupStableDecay(warmup=warmup, decay=decay, floor=0.0)
        precision = "fp32" if self.options.small else "bf16"
        return Trainer(model, steps=steps, schedule=schedule, optimizer=AdamW(lr=self.options.lr), precision=precision)

    def loss(self, model: Decoder) -> float:
        """Nats a token on the first sequences of the val split."""
        sizes = {name: self.sizes[name] for name in ("batch_size", "seq_len")}
        return validate(model, self.val, **sizes, num_sequences=self.sizes["val_sequences"])

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)

    def fit(self, trainer: Trainer, seed: int, first: int, steps: int) -> list[dict[str, float]]:
        """Makes `steps` steps, reading from batch `first` on; a row for each."""
        batch, rows = self.sizes["batch_size"], []
        for step in range(first, first + steps):
            read = torch.arange(step * batch, (step + 1) * batch).numpy()
            began = time.perf_counter()
            done = trainer.step(self.train.sequences(read, self.sizes["seq_len"], seed))
            row = {"loss": done.loss, "time_s": time.perf_counter() - began}
            rows.append(row | ({} if done.loads is None else done.loads.row()))
        return rows

    def run(self, arm: str, seed: int, model: Decoder, first: int) -> Trainer:
        """Trains `model` from step `first` to the last one, and keeps what it gave; the dense one's weights at half, too."""
        steps, half = self.steps - first, self.steps // 2
        trainer = self.trainer(model, steps, max(1, round(DECAY * self.steps)), max(1, min(100, steps // 10)))
        more: dict[str, float] = {}
        if arm == DENSE:
            rows = self.fit(trainer, seed, 0, half)
            save(trainer.model, self.folder / f"half-{seed}", dtype=torch.float32)
            more["val_loss_at_half"] = self.loss(trainer.model)
            rows += self.fit(trainer, seed, half, steps - half)
        else:
            if first:
                more["val_loss_at_start"] = self.loss(trainer.model)
            rows = self.fit(trainer, seed, first, steps)
        tokens = self.sizes["batch_size"] * self.sizes["seq_len"]
        last = rows[-LAST:]
        found = {
            "arm": arm, "seed": seed, "steps": steps, "val_loss": self.loss(trainer.model), **more,
            "train_loss": statistics.fmean(row["loss"] for row in last),
            "tokens_per_s": tokens / statistics.median(row["time_s"] for row in rows),
        }  # fmt: skip
        for name in ("expert_load", "router_entropy"):
            if name in rows[-1]:
                found[name] = statistics.fmean(row[name] for row in last)
        self.runs.append(found | {"losses": [round(row["loss"], 4) for row in rows]})
        self.say(
            ", ".join(f"{key} {value:.5g}" if isinstance(value, float) else f"{value}" for key, value in found.items())
        )
        self.keep()
        return trainer

    def keep(self) -> None:
        """Writes the result so far."""
        configs = {
            name: {"params": one.num_params, "active": one.active_params, "flops_a_token": 3 * one.flops_per_token(self.sizes["seq_len"])}
            for name, one in self.configs.items()
        }  # fmt: skip
        found = {
            "sizes": self.sizes, "steps": self.steps, "lr": self.options.lr, "small": self.options.small, "models": configs,
            "bytes_per_token": self.val.num_bytes / self.val.num_tokens, "train_tokens": self.train.num_tokens,
            "text": self.options.text, "stamp": ledger.stamp_of(self.device), "runs": self.runs,
        }  # fmt: skip
        write_atomic(self.options.out / "result.json", json.dumps(found, indent=1).encode())

    def choose_steps(self) -> None:
        """As many steps as fit into the minutes: of every seed one run of the dense model and two of experts, at the pace of a trial.

        With --small there is no trial."""
        if self.options.small:
            self.steps = self.options.steps or 20
            return
        pace = {}
        for name in (DENSE, SCRATCH):
            trainer = self.trainer(self.made(name, 0), TRIAL_STEPS, 1, 1)
            pace[name] = statistics.median(
                row["time_s"] for row in self.fit(trainer, 0, 0, TRIAL_STEPS)[-TRIAL_STEPS // 2 :]
            )
        left = 60 * self.options.minutes - (time.monotonic() - self.begun)
        experts = 1 if self.options.scratch else 2
        fits = int(0.8 * left / self.options.seeds / (pace[DENSE] + experts * pace[SCRATCH]))
        self.steps = max(20, min(self.steps or fits, fits) // 2 * 2)
        self.say(f"{self.steps} steps; one takes {pace[DENSE]:.4f} s dense, {pace[SCRATCH]:.4f} s with experts")

    def seed(self, seed: int) -> None:
        """Every arm of one seed."""
        self.run(DENSE, seed, self.made(DENSE, seed), 0)
        half, small = self.steps // 2, self.folder / f"half-{seed}"
        for arm, anew in () if self.options.scratch else ((UPCYCLED, 0.0), (DROPPED, 0.5)):
            self.run(arm, seed, self.upcycle(small, anew, seed), half)
        self.run(SCRATCH, seed, self.made(SCRATCH, seed), 0)


def measured(options: argparse.Namespace) -> None:
    """Trains all arms of all seeds."""
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if options.data.suffix == ".xz":
            with tarfile.open(options.data) as archive:
                archive.extractall(scratch, filter="data")
            options.data = Path(scratch)
        twins = Twins(options, Path(scratch))
        twins.choose_steps()
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            twins.seed(seed)
    print(table(json.loads((options.out / "result.json").read_text())))


def bits(result: dict[str, Any], arm: str) -> list[float]:
    """Bits a byte on the val split, by seed."""
    return [run["val_loss"] / math.log(2) / result["bytes_per_token"] for run in result["runs"] if run["arm"] == arm]


def table(result: dict[str, Any]) -> str:
    """The comparison in Markdown: means over seeds, least and most."""
    lines = [
        "| model | parameters, active | val loss, bits/byte | difference to dense, 95 % interval | busiest / mean | router's entropy, nats | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    base = bits(result, DENSE)
    for arm in (DENSE, SCRATCH, UPCYCLED, DROPPED):
        runs = [run for run in result["runs"] if run["arm"] == arm]
        if not runs:
            continue
        found, sizes = bits(result, arm), result["models"][DENSE if arm == DENSE else SCRATCH]
        less = "" if arm == DENSE or len(found) < 2 or len(base) != len(found) else _signed(*paired(base, found)[:2])
        cells = [
            arm if arm in (DENSE, SCRATCH) else f"{arm} at half",
            f"{sizes['params'] / 1e6:.1f} M, {sizes['active'] / 1e6:.1f} M",
            _range(found, ".4f"), less,
            _range([run["expert_load"] for run in runs], ".2f") if "expert_load" in runs[0] else "",
            _range([run["router_entropy"] for run in runs], ".2f") if "router_entropy" in runs[0] else "",
            f"{statistics.fmean(run['tokens_per_s'] for run in runs):,.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _signed(by: float, half: float) -> str:
    return f"{by:+.4f} +- {half:.4f}"


def _range(values: list[float], form: str) -> str:
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def words(result: dict[str, Any]) -> str:
    """What was measured, in a paragraph."""
    sizes, runs = result["sizes"], result["runs"]
    each, seeds = sizes["batch_size"] * sizes["seq_len"], len({run["seed"] for run in runs})
    flops = {name: one["flops_a_token"] for name, one in result["models"].items()}
    machine = result["stamp"]["machine"]
    where = machine["gpus"][0]["name"] if machine.get("gpus") else machine["cpu"]
    begun = {arm: [run["val_loss_at_start"] for run in runs if run["arm"] == arm] for arm in (UPCYCLED, DROPPED)}
    halves = [run["val_loss_at_half"] for run in runs if run["arm"] == DENSE]
    upcycled = ""
    if begun[UPCYCLED]:
        jump = max(abs(one - other) for one, other in zip(begun[UPCYCLED], halves, strict=False))
        upcycled = (
            f"Upcycled ones begin at the dense model's half: their loss differs there by at most {jump:.1e} nats, with half of each "
            f"expert's channels drawn anew it is {statistics.fmean(begun[DROPPED]) - statistics.fmean(halves):+.3f}. "
        )
    return (
        f"**Measured** against a dense twin of as many FLOPs a token, on {where}: {result['steps']} steps of {each:,} tokens ({result['steps'] * each / 1e6:.0f} M of {result['train_tokens'] / 1e6:.0f} M), "
        f"{result['text'] or 'text'}; AdamW at {result['lr']:g}, constant, the last {DECAY:.0%} of the steps down to 0; {seeds} seeds, least and most. "
        f"{sizes['num_experts']} experts of 1/{sizes['granularity']} of the dense width, {sizes['granularity']} a token, `aux_loss` of {BALANCE[0]['weight']}: "
        f"{flops[SCRATCH] / flops[DENSE]:.3f} times the dense model's FLOPs a token. {upcycled}"
        f"Busiest / mean is that of the worst layer, over the last {LAST} steps."
    )


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The ledger's rows: each arm against what it is measured by."""
    models, seeds = result["models"], len({run["seed"] for run in result["runs"]})
    tokens = result["steps"] * result["sizes"]["batch_size"] * result["sizes"]["seq_len"]
    what = f"{models[SCRATCH]['params'] / 1e6:.0f} M weights, {models[SCRATCH]['active'] / 1e6:.0f} M active, {tokens / 1e6:.0f} M tokens"
    found = []
    for arm, peer, technique in (
        (SCRATCH, DENSE, "feed-forward/moe"), (UPCYCLED, SCRATCH, "growth/upcycle"), (DROPPED, SCRATCH, "growth/upcycle"),
        (UPCYCLED, DENSE, None), (DROPPED, DENSE, None),
    ):  # fmt: skip
        mine, theirs = bits(result, arm), bits(result, peer)
        if not mine or len(mine) != len(theirs):
            continue
        row = {
            "figure": f"{what}: {arm}, val loss", "value": statistics.fmean(mine), "unit": "bits/byte", "n": seeds,
            "peer": "dense twin" if peer == DENSE else "experts from scratch", "peer_value": statistics.fmean(theirs),
            "ratio": statistics.fmean(mine) / statistics.fmean(theirs), "note": words(result),
        }  # fmt: skip
        if technique is not None:
            row["technique"] = technique
        if len(mine) > 1:
            by = paired(theirs, mine)
            row |= {"difference": by.by, "difference_interval": by.half}
        found.append(row)
    return found


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The results of several processes of other seeds as one: as many steps of the same sizes of the same data."""
    found, *others = (json.loads(path.read_text(encoding="utf8")) for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        apart = [name for name in ("sizes", "steps", "lr", "models", "train_tokens") if found[name] != other[name]]
        if apart or {run["seed"] for run in found["runs"]} & {run["seed"] for run in other["runs"]}:
            raise SystemExit(
                f"{path} and {paths[0]} differ in {', '.join(apart)}" if apart else f"{path} has a seed again"
            )
        found["runs"] += other["runs"]
    return found


def write_page(*paths: Path, keep: bool = True) -> None:
    """Puts the table into docs/moe.md and, with `keep`, the rows into the ledger."""
    result = merged(paths)
    begin = BEGIN if any(run["arm"] == UPCYCLED for run in result["runs"]) else SCRATCH_BEGIN
    ledger.put_between(PAGE, begin, END, f"{words(result)}\n\n{table(result)}\n\n")
    if keep:
        print(ledger.append("moe_twin", rows(result), stamp=result["stamp"]))


def parser_of(text: str, minutes: float) -> argparse.ArgumentParser:
    """The options of a script that trains twins."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="a result that a run wrote")
    parser.add_argument("--data", type=Path, help="folder of a data stage, or an archive of its folder tokens")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--steps", type=int, default=0, help="most steps of a run; 0: as many as fit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--text", default="", help="what the data are, for the page")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.set_defaults(first_seed=0, scratch=False)
    return parser


def sized(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Sets the sizes that `options` leaves out. Exits where there is nothing to train on."""
    if options.data is None or options.out is None:
        parser.error("give --data and --out")
    for name, size in (SMALL if options.small else SIZES).items():
        setattr(options, name, getattr(options, name) or size)


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = parser_of(__doc__ or "", minutes=8)
    parser.add_argument("--scratch", action="store_true", help="nothing upcycled")
    parser.add_argument("--first-seed", type=int)
    parser.add_argument(
        "--and", dest="others", type=Path, nargs="+", default=[], help="with --page: results of other seeds"
    )
    options = parser.parse_args(arguments)
    if options.page:
        write_page(options.page, *options.others)
        return
    sized(parser, options)
    measured(options)


if __name__ == "__main__":
    main()
