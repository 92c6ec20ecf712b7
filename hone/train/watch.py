"""Logs of a running training: steps.jsonl, timings, curves (TensorBoard and what else the user names) and the progress bar."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from hone.base.figure import human_bytes
from hone.base.run import Progress
from hone.train.curves.base import Curves
from hone.train.curves.tensorboard import TensorBoard
from hone.train.live.rank_times import Stragglers, Took

EXPERTS = {"expert_load": "load", "expert_drops": "drops", "router_entropy": "entropy"}
"""Figures of models with experts in steps.jsonl (`hone.train.routing.loads`), and their names as curves."""
MOST_TIMES = 16
"""Ranks whose times are logged at every step; of twice as many they are logged at every second one."""


class Watch:
    """Logs every step.

    `steps.jsonl` in `folder` is content: equal for two runs of one spec, and on a resume the lines after the
    checkpoint's step are dropped. `timing.jsonl` and TensorBoard events in `log` differ from run to run.
    `curves` get the same points as TensorBoard, `progress` every line of both files. Tokens are those of documents, padding is none.
    MFU (model FLOPs utilization) is `train_flops_per_token` (None: 3 x `forward_flops_per_token`) x positions/s / `peak_flops_per_s`, with the
    `step_positions` that a step computes, padding included: 6 a weight (head
    included, embedding lookup not) plus causal-halved attention, recomputation not counted; None without a peak. With
    `full_flops_per_token`, which count attention to masked positions too as torchtitan does, it is `mfu_full_attention`.
    `joules` are those of this rank's device so far, or None; `stragglers` sees the times of `num_ranks` ranks.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        *,
        device: str,
        resume_at: int = 0,
        tokens: int = 0,
        step_positions: int = 0,
        forward_flops_per_token: float = 0.0,
        train_flops_per_token: float | None = None,
        full_flops_per_token: float = 0.0,
        peak_flops_per_s: float | None = None,
        progress: Progress | None = None,
        kept: Callable[[], None] | None = None,
        curves: tuple[Curves, ...] = (),
        say: Callable[[str], None] = lambda line: None,
        warn: Callable[[str], None] = lambda line: None,
        joules: Callable[[], float | None] = lambda: None,
        stragglers: Stragglers | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.path, self._timing_path = folder / "steps.jsonl", log / "timing.jsonl"
        self._open(lambda row: row["step"] <= resume_at)
        self._curves = (TensorBoard(log, resume_at), *curves)
        self._device = device
        self._tokens = tokens
        """Those of the steps before `resume_at`, then of every logged one."""
        self._step_positions = step_positions
        self._flops_per_token = train_flops_per_token or 3 * forward_flops_per_token
        self._full = full_flops_per_token / forward_flops_per_token if forward_flops_per_token else None
        self._peak = peak_flops_per_s
        self._progress = progress
        self._kept = kept
        self.say, self._warn = say, warn
        self._joules, self._spent = joules, joules()
        self._stragglers, self._num_ranks = stragglers, num_ranks
        self._took: Took | None = None
        self._logged = self._lines_to(resume_at)
        """Lines of ranks' times in timing.jsonl."""
        self._before = time.perf_counter()
        self.rates: list[tuple[int, float]] = []
        """(tokens, seconds) of every step of this process, without evaluation and checkpoints."""

    def _open(self, stays: Callable[[dict[str, Any]], bool]) -> None:
        """Opens the logs, with the lines that `stays` accepts."""
        self._steps, self._timing = (_cut_back(path, stays) for path in (self.path, self._timing_path))

    def _lines_to(self, step: int) -> int:
        """Lines of ranks' times up to `step`."""
        return step * MOST_TIMES // self._num_ranks

    def rewound(self, row: dict[str, Any], tokens: int) -> None:
        """Drops the lines from `row`'s step on, to which the training went back, and writes `row`; `tokens` were read before it.

        Lines of earlier rewinds stay.
        """
        why, before = row["rewound"], row["step"] - 1
        self.say(f"step {why['from']} is a spike: {why['why']}; going back to step {before}")
        self._steps.close()
        self._timing.close()
        self._open(lambda row: row["step"] <= before or "rewound" in row)
        self._write(self._steps, row)
        for curves in self._curves:
            curves.back(before)
        self._tokens, self._logged = tokens, self._lines_to(before)
        if self._progress is not None:
            self._progress.skip(before - why["from"] + 1)
        self._before = time.perf_counter()

    def stepped(self, row: dict[str, Any], took: Took | None = None) -> None:
        """Logs a training step; `row` is its line in steps.jsonl, `took` the newest times of all ranks."""
        now = time.perf_counter()
        time_s, self._before = now - self._before, now
        tokens, self._tokens = row["tokens"] - self._tokens, row["tokens"]
        self.rates.append((tokens, time_s))
        rate = tokens / time_s
        mfu = self.mfu(1 / time_s)
        memory = _memory_bytes(self._device)
        self._write(self._steps, row)
        timing = {"step": row["step"], "tokens_per_s": rate, "mfu": mfu, "memory_bytes": memory, "time_s": time_s}
        if mfu is not None and self._full is not None:
            timing["mfu_full_attention"] = mfu * self._full
        joules = self._joules()
        if joules is not None and self._spent is not None and tokens:
            timing["joules_per_token"] = (joules - self._spent) / tokens
        self._spent = joules
        self._write(self._timing, timing)
        if took is not None and took is not self._took:
            self._took = took
            self._ranks_took(took)
        points = {f"train/{name}": row[name] for name in ("loss", "lr", "grad_norm") if row[name] is not None}
        points |= {f"experts/{name}": row[key] for key, name in EXPERTS.items() if key in row}
        if "why" in row:
            self.say(f"step {row['step']} is skipped: {row['why']}")
            points["train/skipped"] = 1.0
        speeds = {f"speed/{name}": value for name, value in timing.items() if name != "step" and value is not None}
        self._add({**points, **speeds}, row["step"])
        if self._progress is not None:
            loss = "none" if row["loss"] is None else f"{row['loss']:.3f}"
            norm = "not finite" if row["grad_norm"] is None else f"{row['grad_norm']:.2f}"
            shown = "" if mfu is None else f"  MFU {mfu:.0%}"
            text = f"loss {loss}  grad {norm}  {rate:,.0f} tokens/s{shown}  {human_bytes(memory)}"
            self._progress.advance(1, text)

    def _ranks_took(self, took: Took) -> None:
        """Logs the times of all ranks, of many ranks not of every step, and says which of them the others wait for."""
        if self._logged * self._num_ranks <= took.step * MOST_TIMES:
            self._logged += 1
            self._write(self._timing, took.row())
        said = "" if self._stragglers is None else self._stragglers.notice(took)
        if said:
            self._warn(said)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Logs an evaluation; `row` is its line in steps.jsonl."""
        self._write(self._steps, row)
        points = {
            f"val/{name.removeprefix('val_')}": value for name, value in row.items() if name not in ("step", "samples")
        }
        self._add(points, row["step"])
        self._before = time.perf_counter()

    def _write(self, file: TextIO, row: dict[str, Any]) -> None:
        file.write(json.dumps(row) + "\n")
        file.flush()
        if self._progress is not None:
            self._progress.saw(row)

    def _add(self, points: dict[str, float], step: int) -> None:
        for curves in self._curves:
            curves.add(points, step)

    def sync(self) -> None:
        """Syncs everything written so far to disk, then calls `kept`, which stores the time spent."""
        for file in (self._steps, self._timing):
            file.flush()
            os.fsync(file.fileno())
        for curves in self._curves:
            curves.flush()
        if self._kept is not None:
            self._kept()

    def restart_clock(self) -> None:
        """Excludes the time since the last step (of a checkpoint) from the next step's time."""
        self._before = time.perf_counter()

    def mfu(self, steps_per_s: float) -> float | None:
        """Model FLOPs utilization at this rate; None without a calibrated peak."""
        if self._peak is None or not self._flops_per_token or not self._step_positions:
            return None
        return self._flops_per_token * self._step_positions * steps_per_s / self._peak

    def rate(self) -> tuple[float, float]:
        """(tokens/s, steps/s) over this process's steps, without the first two (warm-up) when there are more than five."""
        rates = self.rates[2:] if len(self.rates) > 5 else self.rates
        time_s = max(sum(time_s for _, time_s in rates), 1e-9)
        return sum(tokens for tokens, _ in rates) / time_s, len(rates) / time_s

    def close(self, *, whole: bool = True) -> None:
        """Syncs and closes the files; `whole` says whether the training reached its last step."""
        self.sync()
        self._steps.close()
        self._timing.close()
        for curves in self._curves:
            curves.close(whole=whole)


def _cut_back(path: Path, stays: Callable[[dict[str, Any]], bool]) -> TextIO:
    """The file, to be written at its end, of the lines that `stays` accepts, without an incomplete last one."""
    kept = []
    for line in path.read_text(encoding="utf8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n") and stays(json.loads(line)):
            kept.append(line)
    path.write_text("".join(kept), encoding="utf8")
    return open(path, "a", encoding="utf8")


def _memory_bytes(device: str) -> int:
    """Resident bytes of this process; on a GPU the peak of allocated memory so far, since little of it is in use at a step's end."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    from hone.measure.memory import resident_bytes

    return resident_bytes()
