"""The train stage of recipes/reference.yaml on two GPUs, killed at about half of its steps and resumed in another layout.

    hone run recipes/reference.yaml ...                                        # anywhere: makes the data stages (and would train here)
    python -m benchmarks.reference_run --pack work/reference --data .refdata   # the packed tokens alone, as .tar.xz of a third of their size
    python -m benchmarks.reference_run --data .refdata --out OUT --minutes 9   # on the machine with GPUs; writes OUT/result.json
    python -m benchmarks.reference_run --data .refdata --out OUT --minutes 9 --steps 1400    # the same without calibration and trials
    python -m benchmarks.reference_run --page OUT/result.json                  # here: docs/reference.md, its picture, benchmarks/ledger/reference.json
    python -m benchmarks.reference_run --data .refdata --out OUT --small       # the same on a CPU, a tiny model in two minutes: nothing of it is a figure

All ranks are killed with SIGKILL some steps after a checkpoint. The second layout begins at that checkpoint, so these steps are made in both,
of the same weights and the same sequences: their losses differ by rounding, or something is wrong. Then it goes on to the last step.
The number of steps is the recipe's, or as many as a trial of both layouts says fit into the minutes; each trial also fills the cache of
compiled kernels. A layout whose trial fails is left out, and the result says so. With `--steps` there is neither calibration nor trial, so
that the minutes are left to the training, and the plan's times are bounds. Where that many steps do not fit, the first layout is killed after
half of the time, and the second ends early, with a model: the page says at which step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hone.base.durable import write_atomic
from hone.base.spec import parse_scalar, read_yaml, set_dotted

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "reference.yaml"
SOURCES = ("books", "code")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2 on 2 ranks": (2, {"data_parallel": "zero2"}),
    "ddp on 2 ranks": (2, {"data_parallel": "ddp"}),
    "tensor parallel on 2 ranks": (2, {"tensor_parallel_degree": 2}),
    "zero3 on 2 ranks": (2, {"data_parallel": "zero3"}),
    "one rank": (1, {}),
}
"""{name: (ranks, the field parallelism)}."""
OVERLAP = 20
"""Steps after the checkpoint at which the first layout is killed."""
TRIAL_STEPS = 24
EVAL_RESERVE_S, START_RESERVE_S = 45.0, 40.0
END_RESERVE_S = 95.0
"""Seconds of the minutes that a training's own clock does not count: two starts up to the first step's compiling, the steps made twice, the end."""
SMALL: dict[str, Any] = {
    "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128, "max_seq_len": 256},
    "precision": "fp32",
    "compile": False,
    "batch_size": 8,
    "seq_len": 64,
    "steps": 60,
    "schedule": {"kind": "wsd", "warmup": 5, "decay": 0.25, "floor": 0},
    "validation": {"interval": 20, "sequences": 8},
    "checkpoint": {"interval": 10, "keep": {"last": 4, "interval": 15}},
}  # fmt: skip


@dataclass
class Session:
    """What one call of the script knows: its options, its clock, its folders, and the result that is written after every part."""

    options: argparse.Namespace
    device: str
    work: Path
    begun: float = field(default_factory=time.monotonic)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds of the minutes that are left."""
        return self.options.minutes * 60 - (time.monotonic() - self.begun)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)

    def keep(self, **parts: Any) -> None:
        """Adds parts to the result and writes it, so that a run that is cut off leaves what it had."""
        self.result |= parts
        write_atomic(self.options.out / "result.json", json.dumps(self.result, indent=1).encode())


@dataclass
class Join:
    """The checkpoint after which the second layout goes on: the one at `step`, or an earlier one if half of the time is over before."""

    step: int
    interval: int
    """Steps between checkpoints."""
    overlap: int
    half: float
    """When half of the time is over, on the clock of time.monotonic()."""

    def passed(self, rows: list[dict[str, Any]]) -> bool:
        """Whether the last of `rows`, those of a steps.jsonl so far, is `overlap` steps after that checkpoint; sets `step`."""
        done = rows[-1]["step"] if rows else 0
        if time.monotonic() > self.half:
            self.step, self.half = min(self.step, (done // self.interval + 1) * self.interval), float("inf")
        return done >= self.step + self.overlap


def pack(line: Path, target: Path) -> None:
    """Writes target/SOURCE.tar.xz with tokens, tokenizer and statistics of the data stages in `line`.

    Neither the documents nor hone.json, which would miss them: the folder counts by its files, as one of another program.
    """
    target.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        folder = line / f"data-{source}"
        with tarfile.open(target / f"{source}.tar.xz", "w:xz", preset=1) as archive:
            for path in sorted(
                [folder / "stats.json", *folder.glob("tokenizer*.json"), *(folder / "tokens").iterdir()]
            ):
                archive.add(path, path.relative_to(folder).as_posix())
        print(f"{source}: {(target / f'{source}.tar.xz').stat().st_size / 1e6:.1f} MB")


def unpack(session: Session) -> dict[str, dict[str, Any]]:
    """Unpacks the data into the work folder; {source: split sizes and what its stage dropped}."""
    told: dict[str, dict[str, Any]] = {}
    for source in SOURCES:
        folder = session.work / f"data-{source}"
        with tarfile.open(session.options.data / f"{source}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        meta = json.loads((folder / "tokens" / "meta.json").read_text(encoding="utf8"))
        steps = json.loads((folder / "stats.json").read_text(encoding="utf8"))["steps"]
        kept = ("name", "documents_in", "documents_out", "bytes_in", "bytes_out")
        rows = [{name: step[name] for name in kept if name in step} for step in steps]
        told[source] = {"splits": meta["splits"], "vocab_size": meta["vocab_size"], "steps": rows}
    return told


def spec_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of the recipe's train stage, smaller with `--small`, with what `--set` changes."""
    (stage,) = (one for one in read_yaml(RECIPE)["stages"] if one["stage"] == "train")
    spec = {name: value for name, value in stage.items() if name not in ("stage", "name", "from")}
    spec |= deepcopy(SMALL) if options.small else {}
    for change in options.set:
        name, _, value = change.partition("=")
        set_dotted(spec, name, parse_scalar(value), where="--set")
    return spec


def command(session: Session, spec: dict[str, Any], layout: str, out: Path) -> list[str]:
    """`hone train` of `spec` in `layout`."""
    ranks, parallelism = LAYOUTS[layout]
    program = "hone" if session.options.steps is None else "benchmarks.uncalibrated"
    words = [sys.executable, "-m", program, "train", f"--out={out}", f"--device={session.device}", "--quiet"]
    words += [f"--from.data.{source}={session.work / f'data-{source}'}" for source in SOURCES]
    words += [f"--nproc_per_node={ranks}"] if ranks > 1 else []
    words += [f"--{name}={json.dumps(value)}" for name, value in spec.items() if not isinstance(value, str)]
    words += [f"--{name}={value}" for name, value in spec.items() if isinstance(value, str)]
    return words + ([f"--parallelism={json.dumps(parallelism)}"] if parallelism else [])


def train(
    session: Session, words: list[str], log: Path, limit_s: float, until: Callable[[], bool] = lambda: False
) -> int | None:
    """Runs `words`, its output in `log`; kills all its ranks as soon as `until`, and ends it in order after `limit_s` seconds.

    The result is its exit code; None when `until` killed it.
    """
    with open(log, "w", encoding="utf8") as file:
        started = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    end = time.monotonic() + limit_s
    while started.poll() is None:
        if until():
            _kill(started)
            return None
        if time.monotonic() > end:
            session.say("the time is over: it is asked to save and end")
            started.send_signal(signal.SIGTERM)
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                _kill(started)
        time.sleep(0.05)
    return started.returncode


def _kill(started: subprocess.Popen) -> None:
    """Kills the process and its ranks, which would stay on their GPUs without it, and waits for their ends."""
    ranks = psutil.Process(started.pid).children(recursive=True)
    for one in (*ranks, started):
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
    started.wait()
    psutil.wait_procs(ranks, timeout=20)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log that may still be written."""
    text = path.read_text(encoding="utf8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def pace(folder: Path, first: int = 0) -> dict[str, Any]:
    """Rates of the steps after `first` in the artifact's timing.jsonl, the first fifth of them (compiling, warm-up) left out; medians."""
    rows = [row for row in rows_of(folder / "log" / "timing.jsonl") if "time_s" in row and row["step"] > first]
    rows = rows[min(len(rows) // 5, 20) :]
    if not rows:
        return {}
    found: dict[str, Any] = {"steps": len(rows), "memory_bytes": max(row["memory_bytes"] for row in rows)}
    for name in ("tokens_per_s", "time_s", "mfu", "mfu_full_attention", "joules_per_token"):
        values = [row[name] for row in rows if row.get(name) is not None]
        found |= {name: statistics.median(values)} if values else {}
    return found


def predicted(session: Session, spec: dict[str, Any], layout: str) -> dict[str, Any]:
    """What hone's plan says of `spec` in `layout` on this machine: {estimate: value, unit, formula}.

    Keeps the FLOPs of a trained token, too: without a calibration the training does not say its MFU.
    """
    from hone.base.artifact import Artifact
    from hone.base.plan import facts_of
    from hone.measure.machine import describe
    from hone.train.stage import Train

    ranks, parallelism = LAYOUTS[layout]
    describe.cache_clear()
    machine = describe(session.device).model_copy(update={"num_ranks": ranks})
    facts = {f"data.{one}": facts_of(Artifact.read(session.work / f"data-{one}")) for one in SOURCES}
    plan = Train.read({**spec, "parallelism": parallelism}).plan(facts, machine)
    session.keep(model_flops_per_token=3 * plan.facts.config.flops_per_token(spec["seq_len"]))
    return {
        name: {"value": one.value, "unit": one.unit, "formula": one.formula} for name, one in plan.estimates.items()
    }


def trial(session: Session, spec: dict[str, Any], layout: str) -> dict[str, Any] | None:
    """A few steps in `layout`: its pace and the seconds that its start takes; None when it failed.

    It ends with an evaluation of one batch, so that the training finds those kernels compiled too.
    """
    out, began = session.work / f"trial-{layout.replace(' ', '-')}", time.monotonic()
    short = {**spec, "steps": TRIAL_STEPS, "schedule": {"kind": "cosine", "warmup": 0}}
    short |= {"checkpoint": {"interval": 0}, "validation": {"sequences": spec["batch_size"]}}
    log = session.options.out / f"{out.name}.log"
    code = train(session, command(session, short, layout, out), log, min(session.left_s - 60, 150))
    took = time.monotonic() - began
    if code != 0:
        session.say(f"{layout}: the trial failed (code {code}); the end of its log:\n{log.read_text()[-1500:]}")
        return None
    found = pace(out)
    found["start_s"] = took - TRIAL_STEPS * found["time_s"]
    session.say(f"{layout}: {found['tokens_per_s']:,.0f} tokens/s, {found['start_s']:.0f} s beside the steps")
    return found


def choose_layouts(session: Session, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The first of each list whose trial works, with its trial: {layout: pace}."""
    chosen: dict[str, dict[str, Any]] = {}
    failed = []
    for names in (session.options.first, session.options.then):
        for name in names:
            found = None if name in chosen else trial(session, spec, name)
            if found is not None:
                chosen[name] = found
                break
            failed += [name] if name not in chosen else []
        session.keep(layouts_failed=failed)
    if len(chosen) < 2:
        raise SystemExit(f"no two layouts work: {failed} failed; the logs are in {session.options.out}")
    return chosen


def untried_layouts(options: argparse.Namespace) -> tuple[str, str]:
    """The first of each list; of `then` the first other one."""
    first = options.first[0]
    return first, next(name for name in options.then if name != first)


def steps_that_fit(session: Session, wanted: int, trials: list[dict[str, Any]], interval: int) -> int:
    """`wanted`, or the steps for which the time is enough, a multiple of `interval`; a tenth is kept for checkpoints and evaluations."""
    slow = statistics.fmean(one["time_s"] for one in trials)
    starts = sum(min(one["start_s"], START_RESERVE_S) for one in trials)
    fits = int(0.9 * (session.left_s - starts - EVAL_RESERVE_S) / slow) - OVERLAP
    steps = min(wanted, max(fits // interval, 2) * interval)
    session.say(f"{steps} steps of {slow:.3f} s ({wanted} wanted, {fits} fit)")
    return steps


def run(session: Session) -> None:
    """All parts in order."""
    from hone.base.provenance import provenance
    from hone.measure.machine import describe

    options, spec = session.options, spec_of(session.options)
    session.keep(small=options.small, recipe=spec, data=unpack(session), text=options.text)
    if session.device == "cuda" and not options.small and options.steps is None:
        log = options.out / "calibrate.log"
        words = [sys.executable, "-m", "hone", "calibrate", "--device=cuda", "--nproc_per_node=2"]
        code = train(session, words, log, 90)
        session.say(f"calibrated (code {code})")
    machine = describe(session.device).model_dump(mode="json")
    calibration = machine.pop("calibration", None)
    session.keep(machine=machine, calibrated=calibration is not None, made=provenance())
    trials = choose_layouts(session, spec) if options.steps is None else {}
    first, second = trials or untried_layouts(options)
    every, wanted = spec["checkpoint"]["interval"], spec["steps"]
    spec["steps"] = options.steps or steps_that_fit(session, wanted, [*trials.values()], every)
    keeps = spec["checkpoint"]["keep"]
    spec["checkpoint"] = {**spec["checkpoint"], "keep": {**keeps, "interval": max(spec["steps"] // 4, 1)}}
    session.keep(steps=spec["steps"], steps_wanted=wanted, layouts=[first, second], trials=trials)
    session.keep(ranks=[LAYOUTS[name][0] for name in (first, second)])
    session.keep(predicted={name: predicted(session, spec, name) for name in (first, second)})
    train_in_both(session, spec, first, second)
    session.keep(wall_s=time.monotonic() - session.begun)


def train_in_both(session: Session, spec: dict[str, Any], first: str, second: str) -> None:
    """The training that is killed in the layout `first` and ends in `second`, and the evaluations of its models."""
    options, ends, every = session.options, spec["early_stopping"], spec["checkpoint"]["interval"]
    spec = {**spec, "early_stopping": {**ends, "max_time_s": min(ends["max_time_s"], _time_for_steps(session))}}
    join = Join(
        step=max(round(spec["steps"] / 2 / every), 1) * every,
        interval=every,
        overlap=4 if options.small else OVERLAP,
        half=time.monotonic() + session.left_s / 2,
    )
    out, partial = session.work / "train-base", session.work / "train-base.partial"
    passed = lambda: join.passed(rows_of(partial / "steps.jsonl"))  # noqa: E731
    code = train(session, command(session, spec, first, out), options.out / "first.log", session.left_s - 60, passed)
    before = rows_of(partial / "steps.jsonl")
    session.keep(first={"code": code, "pace": pace(partial), "rows": before}, join=join.step, overlap=join.overlap)
    session.say(f"{first}: killed after step {before[-1]['step'] if before else 0} (code {code})")
    if code is not None:
        raise SystemExit(f"the first layout ended by itself with code {code}: see first.log")
    code = train(session, command(session, spec, second, out), options.out / "second.log", session.left_s - 30)
    folder = out if out.exists() else partial
    rows, timing = rows_of(folder / "steps.jsonl"), pace(folder, join.step)
    session.keep(second={"code": code, "pace": timing, "rows": rows})
    session.say(f"{second}: ended at step {rows[-1]['step']} (code {code})")
    for name in ("steps.jsonl", "log/timing.jsonl", "hone.json"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, options.out / Path(name).name)
    if code == 0:
        manifest = json.loads((out / "hone.json").read_text(encoding="utf8"))
        session.keep(figures=manifest["figures"])
        evaluations(session, out)


def _time_for_steps(session: Session) -> float:
    """Seconds of training after which it has to end, so that its model is written and evaluated in time."""
    return max(session.left_s - END_RESERVE_S, session.left_s / 2)


def evaluations(session: Session, model: Path) -> None:
    """The finished model, then those of earlier steps while there is time: figures on each source's val split."""
    from hone.base.run import Run
    from hone.eval.stage import evaluate

    number = lambda path: int(path.name.rpartition("-")[2])  # noqa: E731
    found: list[dict[str, Any]] = []
    took = 0.0
    models = [("end", model)]
    models += [(number(one), one) for one in sorted((model / "checkpoints").glob("step-*"), key=number)[:-1]]
    small = session.options.small
    fields = {"window": 64 if small else 1024, "max_tokens": 4096 if small else 262144}
    fields |= {"dtype": "float32" if small else "bfloat16"}
    for step, folder in models:
        if found and session.left_s < 1.5 * took:
            break
        row: dict[str, Any] = {"step": step}
        began = time.monotonic()
        for source in SOURCES:
            out = session.work / f"eval-{step}-{source}"
            data = session.work / f"data-{source}"
            made = evaluate(out, folder, data, run=Run(device=session.device, quiet=True), **fields)
            row[source] = {name: one.value for name, one in made.figures.items() if one.value is not None}
        session.say(f"step {step}: " + ", ".join(f"{one} {row[one]['bits_per_byte']:.3f} bits/byte" for one in SOURCES))
        found.append(row)
        took = time.monotonic() - began
        session.keep(evals=found)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="a line with the finished data stages")
    parser.add_argument("--page", type=Path, help="a result.json")
    parser.add_argument("--data", type=Path, default=ROOT / ".refdata", help="folder of the packed data")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--work", type=Path, help="scratch folder for data, checkpoints and models; else one beside --out"
    )
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--steps", type=int, help="steps of the training, made without calibration and trials")
    parser.add_argument("--text", default="", help="what the data are, one sentence for the page")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="")
    parser.add_argument("--first", nargs="+", choices=LAYOUTS, default=["zero2 on 2 ranks", "ddp on 2 ranks"])
    parser.add_argument("--then", nargs="+", choices=LAYOUTS, default=["tensor parallel on 2 ranks", "one rank"])
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the training: steps=20 optimizer.lr=0.01"
    )
    options = parser.parse_args()
    if options.page:
        from benchmarks.reference_page import write

        write(options.page)
        return
    if options.pack:
        pack(options.pack, options.data)
        return
    if options.out is None:
        parser.error("give --out=FOLDER")
    options.out, options.data = options.out.resolve(), options.data.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    work = (options.work or options.out.with_name(f"{options.out.name}.work")).resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work / "compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(work / "compiled" / "triton"))
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() and not options.small else "cpu")
    session = Session(options, device, work)
    run(session)


if __name__ == "__main__":
    main()
