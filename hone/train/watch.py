"""Logs of a running training: steps.jsonl, timings, TensorBoard curves and the progress bar."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from hone.base.figure import human_bytes
from hone.base.run import Progress


class Watch:
    """Logs every step.

    `steps.jsonl` in `folder` is content: equal for two runs of one spec, and on a resume the lines after the
    checkpoint's step are dropped. `timing.jsonl` and TensorBoard events in `log` differ from run to run.
    MFU (model FLOPs utilization) is 3 x `forward_flops_per_token` x tokens/s / `peak_flops_per_s`: 6 a weight (head
    included, embedding lookup not) plus causal-halved attention, recomputation not counted; None without a peak.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        *,
        device: str,
        resume_at: int = 0,
        forward_flops_per_token: float = 0.0,
        peak_flops_per_s: float | None = None,
        progress: Progress | None = None,
        kept: Callable[[], None] | None = None,
    ) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.path = folder / "steps.jsonl"
        for path in (self.path, log / "timing.jsonl"):
            _cut_back(path, resume_at)
        self._steps = open(self.path, "a", encoding="utf8")
        self._timing = open(log / "timing.jsonl", "a", encoding="utf8")
        # TensorBoard itself drops events after the step of the resume when it reads the same step again.
        self._curves = SummaryWriter(str(log), purge_step=resume_at + 1 if resume_at else None)
        self._device = device
        self._flops_per_token = 3 * forward_flops_per_token
        self._peak = peak_flops_per_s
        self._progress = progress
        self._kept = kept
        self._before = time.perf_counter()
        self.rates: list[tuple[int, float]] = []
        """(tokens, seconds) of every step of this process, without evaluation and checkpoints."""

    def stepped(self, row: dict[str, Any]) -> None:
        """Logs a training step; `row` is its line in steps.jsonl."""
        now = time.perf_counter()
        time_s, self._before = now - self._before, now
        tokens = row["tokens"] // row["step"]
        self.rates.append((tokens, time_s))
        rate = tokens / time_s
        mfu = self.mfu(rate)
        memory = _memory_bytes(self._device)
        _write(self._steps, row)
        timing = {"step": row["step"], "tokens_per_s": rate, "mfu": mfu, "memory_bytes": memory, "time_s": time_s}
        _write(self._timing, timing)
        for name in ("loss", "lr", "grad_norm"):
            if row[name] is not None:
                self._curves.add_scalar(f"train/{name}", row[name], row["step"])
        self._curves.add_scalar("speed/tokens_per_s", rate, row["step"])
        if self._progress is not None:
            norm = "overflow" if row["grad_norm"] is None else f"{row['grad_norm']:.2f}"
            shown = "" if mfu is None else f"  MFU {mfu:.0%}"
            text = f"loss {row['loss']:.3f}  grad {norm}  {rate:,.0f} tokens/s{shown}  {human_bytes(memory)}"
            self._progress.advance(1, text)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Logs an evaluation; `row` is its line in steps.jsonl."""
        _write(self._steps, row)
        for name, value in row.items():
            if name != "step":
                self._curves.add_scalar(f"val/{name.removeprefix('val_')}", value, row["step"])
        self._before = time.perf_counter()

    def sync(self) -> None:
        """Syncs everything written so far to disk, then calls `kept`, which stores the time spent."""
        for file in (self._steps, self._timing):
            file.flush()
            os.fsync(file.fileno())
        self._curves.flush()
        if self._kept is not None:
            self._kept()

    def restart_clock(self) -> None:
        """Excludes the time since the last step (of a checkpoint) from the next step's time."""
        self._before = time.perf_counter()

    def mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOPs utilization at this rate; None without a calibrated peak."""
        if self._peak is None or not self._flops_per_token:
            return None
        return self._flops_per_token * tokens_per_s / self._peak

    def tokens_per_s(self) -> float:
        """Rate over this process's steps, without the first two (warm-up) when there are more than five."""
        rates = self.rates[2:] if len(self.rates) > 5 else self.rates
        return sum(tokens for tokens, _ in rates) / max(sum(time_s for _, time_s in rates), 1e-9)

    def close(self) -> None:
        """Syncs and closes the files."""
        self.sync()
        self._steps.close()
        self._timing.close()
        self._curves.close()


def _write(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


def _cut_back(path: Path, step: int) -> None:
    """Drops the lines after `step`, and an incomplete last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    path.write_text("".join(kept), encoding="utf8")


def _memory_bytes(device: str) -> int:
    """Resident bytes of this process; on a GPU the peak of allocated memory so far, since little of it is in use at a step's end."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    from hone.measure.memory import resident_bytes

    return resident_bytes()
