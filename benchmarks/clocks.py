"""Joules by clock on one GPU: a decode loop of an 8B shape at full and at locked clocks, joules by phase, and a training within a budget.

    python -m benchmarks.clocks                       # a minute and a half on an H100: nothing is set, the sweep is modelled
    python -m benchmarks.clocks --lock                # locks clocks and gives them back: your own machine, as root

Without --lock, and where the driver refuses a lock, which is then printed, the sweep is modelled from what full clocks took.
Rows go to benchmarks/ledger/clocks.jsonl, each with how it was got.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.serve import SHAPES, exactly, prompts_of, random_model
from benchmarks.train import SHAPES as TRAINED
from benchmarks.train import random_batch, random_decoder
from hone.base.run import Run
from hone.feed.load import Batch
from hone.measure.clocks.fit import Point as Measured
from hone.measure.clocks.fit import fit, modelled, spread
from hone.measure.clocks.held import FULL, Held, Setting, holding
from hone.measure.clocks.nvml import Gpu, NvmlError, open_gpu
from hone.measure.clocks.policies.base import FOLLOWS
from hone.measure.energy import Meter, at_rest
from hone.serve.engine import Engine
from hone.serve.request import Request
from hone.serve.spec import EngineSpec
from hone.train.budget.control import Budget
from hone.train.budget.spec import Energy
from hone.train.intervals import EarlyStopping, Stop
from hone.train.loop import Trainer
from hone.train.loop import fit as train
from hone.train.schedules.wsd import WarmupStableDecay


class Took(NamedTuple):
    """Work that was measured: units, seconds, joules (None without a sensor)."""

    units: float
    seconds: float
    joules: float | None
    calls: int

    @property
    def unit_ms(self) -> float:
        return 1e3 * self.seconds / self.units

    @property
    def unit_j(self) -> float | None:
        return None if self.joules is None else self.joules / self.units


class Bench:
    """One GPU, and the rows found on it."""

    def __init__(self, arguments: argparse.Namespace, gpu: Gpu | None, note: str) -> None:
        self.arguments, self.gpu, self.device = arguments, gpu, arguments.device
        self.rows: list[dict[str, Any]] = []
        self.idle_w: float | None = None
        print(note, flush=True)

    def add(self, figure: str, value: float | None, unit: str, how: str = "measured", **more: Any) -> None:
        self.rows.append({"figure": figure, "value": value, "unit": unit, "how": how, **more})
        shown = "none" if value is None else f"{value:,.4g}"
        print(f"  {figure}: {shown} {unit} ({how}) {more or ''}", flush=True)

    def during(self, work: Callable[[], float], seconds: float, calls: int | None = None) -> Took:
        """`work`, which returns its units, again and again for `seconds`, or `calls` times, between two readings of the meter."""
        self._wait()
        meter = Meter(self.device)
        meter.start()
        begun, units, done = time.perf_counter(), 0.0, 0
        while done < calls if calls is not None else time.perf_counter() - begun < seconds:
            units += work()
            done += 1
        self._wait()
        took = Took(units, time.perf_counter() - begun, meter.joules(), done)
        meter.stop()
        return took

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def at_idle(self, when: str) -> None:
        self.idle_w = at_rest(self.device)
        self.add(f"power at rest, {when}", self.idle_w, "W")
        if self.gpu is not None:
            self.add(f"clock at rest, {when}", self.gpu.clocks_mhz()[0], "MHz")

    # decode

    def engine(self) -> Engine:
        shape, vocab = SHAPES[self.arguments.shape]
        config = shape.config(vocab)
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        spec = EngineSpec(max_num_seqs=self.arguments.batch, kv_cache_memory_bytes=self.arguments.cache_bytes)
        engine = Engine(random_model(config, self.device, dtype), spec, device=self.device)
        engine.generate([[1] * 8], exactly(2))
        self.vocab = vocab
        return engine

    def decoding(self, engine: Engine) -> Callable[[], float]:
        """A step of `batch` sequences that all decode, begun anew at the same context."""
        batch, context = self.arguments.batch, self.arguments.context
        self.clear(engine)
        before = engine.stats()["output_tokens"]
        most = engine.max_model_len - context - 1
        for number, prompt in enumerate(prompts_of(batch, context, context, self.vocab)):
            engine.add(Request(f"d{time.perf_counter_ns()}-{number}", prompt, exactly(most)))
        while engine.stats()["output_tokens"] < before + 3 * batch:  # prompts are in
            engine.step()

        def step() -> float:
            before = engine.stats()["output_tokens"]
            engine.step()
            return engine.stats()["output_tokens"] - before

        return step

    @staticmethod
    def clear(engine: Engine) -> None:
        """Aborts what is in progress."""
        for request in list(engine._seqs):
            engine.abort(request)
        while engine.has_work:
            engine.step()
        engine.pool.clear()

    def sweep(self, engine: Engine, held: Held | None) -> None:
        arguments = self.arguments
        step = self.decoding(engine)
        settling = self.during(step, arguments.settle).calls
        full = self.during(step, arguments.seconds)
        name = f"{arguments.shape} decode, batch {arguments.batch}"
        self.of(f"{name}, full clocks", full, "token", clock=self._clock())
        points, why = [], "no clock was to be set (--lock)" if self.gpu is not None else "NVML does not show the device"
        if held is not None and self.gpu is not None:
            clocks = spread(self.gpu.supported_mhz(), arguments.settings, arguments.lowest)
            try:
                for mhz in clocks:
                    held.set(Setting(sm_mhz=mhz))
                    step = self.decoding(engine)  # the same contexts and as many steps for all clocks
                    self.during(step, 0.0, settling)
                    took = self.during(step, 0.0, full.calls)
                    self.of(f"{name}, locked at {mhz} MHz", took, "token", clock=self._clock(), full=full)
                    if took.unit_j is not None:
                        points.append(Measured(mhz, took.seconds / took.units, took.unit_j))
                held.set(FULL)
            except NvmlError as error:
                why = str(error)
                print(f"the lock is refused: {why}")
        if len(points) >= 5:
            self._fitted(name, points)
        elif full.unit_j is not None and self.idle_w is not None and self.gpu is not None:
            self._modelled(name, full, why)

    def _clock(self) -> int | None:
        return None if self.gpu is None else self.gpu.clocks_mhz()[0]

    def of(self, name: str, took: Took, unit: str, full: Took | None = None, **more: Any) -> None:
        """Joules and milliseconds a unit, joules above rest, and what was saved against `full`."""
        self.add(f"{name}: joules a {unit}", took.unit_j, f"J/{unit}", n=int(took.units), **more)
        self.add(f"{name}: ms a {unit}", took.unit_ms, "ms", n=int(took.units))
        if took.joules is not None:
            self.add(f"{name}: mean power", took.joules / took.seconds, "W")
            if self.idle_w is not None:
                above = (took.joules - self.idle_w * took.seconds) / took.units
                self.add(f"{name}: joules a {unit} above rest", above, f"J/{unit}")
        if full is not None and full.unit_j and took.unit_j:
            self.add(f"{name}: energy saved", 1 - took.unit_j / full.unit_j, "fraction")
            self.add(f"{name}: time against full clocks", took.unit_ms / full.unit_ms, "x")

    def _fitted(self, name: str, points: list[Measured]) -> None:
        try:
            found = fit(points, self.idle_w)
        except ModuleNotFoundError:  # no scipy here: the points are in the rows
            print("no fit: scipy is not installed")
            return
        worst = max(abs(found.energy_j(one.mhz) / one.energy_j - 1) for one in points)
        note = f"k {found.exponent:.2f}, follows the clock {found.compute_s / found.time_s(found.full_mhz):.0%}, knee {found.knee_mhz:.0f} MHz"
        self.add(f"{name}: worst error of the fitted model", worst, "fraction", note=note)

    def _modelled(self, name: str, full: Took, why: str) -> None:
        assert self.gpu is not None and self.idle_w is not None and full.joules is not None
        clocks = spread(self.gpu.supported_mhz(), self.arguments.settings, self.arguments.lowest)
        watts = max(full.joules / full.seconds, self.idle_w)
        model = modelled(full.seconds / full.units, watts, self.idle_w, FOLLOWS["decode"], max(clocks))
        for mhz in clocks[1:]:
            saved = 1 - model.energy_j(mhz) / model.energy_j(max(clocks))
            slower = model.time_s(mhz) / model.time_s(max(clocks))
            more = {
                "note": f"{why}; {FOLLOWS['decode']:.0%} of the time is taken to follow the clock, and all power above rest"
            }
            self.add(f"{name}, {mhz} MHz: energy saved", saved, "fraction", "modelled", **more)
            self.add(f"{name}, {mhz} MHz: time against full clocks", slower, "x", "modelled", **more)

    # the other phases

    def prefill(self, engine: Engine) -> None:
        self.clear(engine)
        length = min(2048, engine.max_model_len - 2)
        prompts = prompts_of(4, length, length, self.vocab, 2)

        def work() -> float:
            engine.pool.clear()
            engine.generate(prompts, exactly(1))
            return float(sum(map(len, prompts)))

        work()
        self.of(
            f"{self.arguments.shape} prefill", self.during(work, self.arguments.seconds), "token", clock=self._clock()
        )

    def training(self) -> Trainer:
        sizes, vocab = TRAINED[self.arguments.trained]
        precision = "fp32" if self.device == "cpu" else "bf16"
        trainer = Trainer(
            random_decoder(sizes.config(vocab), self.device),
            steps=100_000,
            schedule=WarmupStableDecay(),
            precision=precision,
        )
        rows, length = self.arguments.rows, self.arguments.length
        batch = random_batch(np.random.default_rng(0), vocab, rows, length)
        for _ in range(4):
            trainer.step(batch)

        def work() -> float:
            trainer.step(batch)
            return float(batch.tokens.size)

        took = self.during(work, self.arguments.seconds)
        self.of(f"{self.arguments.trained} training", took, "token", clock=self._clock())
        self.step_w = took.joules and took.joules / took.seconds
        self.step_s = took.seconds / took.units * batch.tokens.size
        return trainer

    def budget(self, trainer: Trainer) -> None:
        """A training planned for twice what its budget suffices for, with the meter as it is."""
        if not self.step_w:
            print("no budget: no reading of joules")
            return
        joules = self.step_w * self.arguments.budget_s
        steps = round(2 * self.arguments.budget_s / self.step_s)
        trainer.done, trainer.tokens, trainer.steps = 0, 0, steps
        trainer.schedule = WarmupStableDecay(warmup=10, decay=0.2)
        with tempfile.TemporaryDirectory() as folder:
            draft, meter = Session(Path(folder)), Meter(self.device)
            run = Run(device=self.device)
            stop = Stop(EarlyStopping(), draft, run)  # type: ignore[arg-type]
            trainer.early = kept = Budget(Energy(budget_j=joules), stop, trainer, trainer.schedule, draft, run)  # type: ignore[arg-type]
            meter.start()
            kept.begin(meter.joules, meter.note, 0.0)
            sizes = {"batch_size": self.arguments.rows, "seq_len": self.arguments.length}
            kept.through(lambda: train(trainer, Drawn(TRAINED[self.arguments.trained][1]), **sizes), None)
            self._wait()
            spent = meter.joules() or 0.0
            meter.stop()
        note = f"{trainer.done} of {steps} planned steps in {time.monotonic() - draft.begun:.1f} s"
        self.add("joules of the budget", joules, "J", "quoted")
        self.add("joules spent of it", spent, "J", note=note)
        self.add("off its line", spent / joules - 1, "fraction", note="target: within 0.02")


class Session:
    """Of a draft, what a budget uses."""

    def __init__(self, state: Path) -> None:
        self.state, self.begun = state, time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun

    def leave_out(self, seconds: float) -> None:
        self.begun += seconds

    def keep_time(self) -> None: ...


class Drawn:
    """Sequences of random tokens."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def sequences(self, indices: np.ndarray, seq_len: int, seed: int) -> Batch:
        return random_batch(np.random.default_rng([seed, int(indices[0])]), self._vocab, len(indices), seq_len)


def main() -> None:
    """Runs all parts, prints their rows, adds them to the ledger."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama3-8b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=32, help="sequences that decode")
    parser.add_argument("--context", type=int, default=512, help="tokens of their prompts")
    parser.add_argument("--cache-bytes", type=int, default=24 * 2**30)
    parser.add_argument("--lock", action="store_true", help="lock the graphics clock; else the sweep is modelled")
    parser.add_argument("--settings", type=int, default=5, help="clocks of the sweep")
    parser.add_argument("--lowest", type=float, default=0.45, help="of the highest clock")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a measurement")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before it")
    parser.add_argument("--trained", default="llama3-1b", choices=TRAINED)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget-s", type=float, default=15.0, help="seconds whose joules are the budget")
    parser.add_argument("--no-ledger", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.zeros(1, device=arguments.device)
    gpu, note = open_gpu(arguments.device) if arguments.device.startswith("cuda") else (None, "a CPU")
    bench = Bench(arguments, gpu, note)
    bench.at_idle("before the model")
    with ExitStack() as stack:
        held = stack.enter_context(holding(gpu)) if gpu is not None and arguments.lock else None
        engine = bench.engine()
        bench.at_idle("with the model")
        bench.sweep(engine, held)
    bench.prefill(engine)
    engine.close()
    del engine
    gc.collect()
    if arguments.device.startswith("cuda"):
        torch.cuda.empty_cache()
    trainer = bench.training()
    bench.budget(trainer)
    print(ledger.table(bench.rows))
    if not arguments.no_ledger:
        print(f"appended to {ledger.append('clocks', bench.rows, arguments.device)}")


if __name__ == "__main__":
    main()
