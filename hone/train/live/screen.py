"""The view of a running training in a terminal: its loss as a curve, its numbers, and a bar for each rank's step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hone.base.figure import human_bytes, human_seconds
from hone.base.run import Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

WIDTH, HEIGHT = 60, 18
"""Columns and rows of the smallest terminal that has room for the view."""
POINTS = 2048
"""Losses that are kept for the curve; when there are more, neighbours are joined into their mean."""
CURVE_ROWS = 6
RANKS = 8
"""Ranks that have a bar; of more those that take longest."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Of a braille character: the bits of its two columns of four dots, from the top."""


class Screen(Progress):
    """Shows a training on a terminal, below what is printed meanwhile, and is gone at its end.

    It is drawn by a thread, four times a second, from the lines of the logs: a step waits for nothing.
    """

    def __init__(
        self,
        label: str,
        total: float | None,
        unit: str = "",
        *,
        ranks: int,
        on_gpus: bool,
        console: Console | None = None,
    ) -> None:
        super().__init__(label, total, unit)
        from rich.console import Console
        from rich.live import Live

        self._num_ranks, self._one = ranks, "a GPU" if on_gpus else "a rank"
        self._lock = threading.Lock()
        self._losses: list[float] = []
        self._each, self._pending = 1, [0.0, 0]
        """Steps of a point of `_losses`; sum and number of the next one's."""
        self._now: dict[str, Any] = {}
        """The newest of every name in the logs."""
        self._console = console or Console(stderr=True)
        self._live = Live(get_renderable=self.view, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    @classmethod
    def where_it_fits(cls, label: str, total: float | None, unit: str = "", **options: Any) -> Screen | None:
        """The view on standard error, or None where its terminal is too small or cannot print the curve."""
        from rich.console import Console

        console = Console(stderr=True)
        small = console.width < WIDTH or console.height < HEIGHT
        return None if small or "utf" not in console.encoding else cls(label, total, unit, console=console, **options)

    def saw(self, row: dict[str, Any]) -> None:
        """As `Progress.saw`, of steps.jsonl and timing.jsonl."""
        with self._lock:
            self._now |= {"val_step": row["step"]} if "val_loss" in row else {}
            self._now |= {"ranks_step": row["step"]} if "busy_s" in row else {}
            self._now |= row
            if row.get("loss") is None:
                return
            self._pending = [self._pending[0] + row["loss"], self._pending[1] + 1]
            if self._pending[1] == self._each:
                self._losses.append(self._pending[0] / self._each)
                self._pending = [0.0, 0]
            if len(self._losses) == POINTS:
                self._losses = [(one + two) / 2 for one, two in zip(self._losses[::2], self._losses[1::2], strict=True)]
                self._each *= 2

    def view(self) -> RenderableType:
        """What the terminal shows now."""
        from rich.console import Group
        from rich.text import Text

        with self._lock:
            now, losses = dict(self._now), list(self._losses)
        width = max(self._console.width - 2, 20)
        done = min(self.done / self.total, 1.0) if self.total else 0.0
        head = f"{self.label} {self.done:,.0f}" + (f" of {self.total:,.0f}  {done:.0%}" if self.total else "")
        if self.rate > 0 and self.total:
            head += f"  {self.rate:.3g} steps/s  {human_seconds(max(self.total - self.done, 0) / self.rate)} left"
        parts: list[RenderableType] = [
            Text(head, "bold", no_wrap=True),
            Text.assemble(("━" * round(done * width), "cyan"), ("━" * (width - round(done * width)), "dim")),
        ]
        if len(losses) > 1:
            parts += self._loss(losses, width)
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in self._numbers(now)]
        if "busy_s" in now:
            parts += self._ranks(now, width)
        return Group(*parts)

    def _loss(self, losses: Sequence[float], width: int) -> list[RenderableType]:
        """The curve, with its highest and lowest value at the left."""
        from rich.text import Text

        columns = width - 9
        lines, (low, high) = curve(losses, columns, CURVE_ROWS), (min(losses), max(losses))
        names = [f"{high:8.3f} ", *[" " * 9] * (CURVE_ROWS - 2), f"{low:8.3f} "]
        return [Text.assemble((name, "dim"), (line, "cyan")) for name, line in zip(names, lines, strict=True)]

    def _numbers(self, now: dict[str, Any]) -> list[str]:
        """Lines of what is known."""

        def known(name: str, form: str) -> list[str]:
            return [form.format(now[name])] if now.get(name) is not None else []

        loss = known("loss", "loss {:.4f}") + known("val_loss", "val {:.4f}") + known("val_step", "(step {:,})")
        loss += known("lr", "lr {:.2e}") + known("grad_norm", "grad norm {:.3g}")
        speed = known("tokens_per_s", "{:,.0f} tokens/s")
        if speed and self._num_ranks > 1:
            speed.append(f"{now['tokens_per_s'] / self._num_ranks:,.0f} {self._one}")
        speed += known("mfu", "MFU {:.1%} (causal attention halved)") + known(
            "mfu_full_attention", "{:.1%} (counted in full)"
        )
        rest = [f"memory {human_bytes(now['memory_bytes'])}"] if now.get("memory_bytes") else []
        rest += known("joules_per_token", "{:.3g} J/token") + known("tokens", "{:,} tokens so far")
        experts = known("expert_load", "busiest expert {:.2f} x the mean") + known("expert_drops", "{:.1%} dropped")
        return ["  ".join(line) for line in (loss, speed, rest, experts) if line]

    def _ranks(self, now: dict[str, Any], width: int) -> list[Text]:
        """A bar a rank: its own work, and what it waits."""
        from rich.text import Text

        busy, wait = now["busy_s"], now["wait_s"]
        order = sorted(range(len(busy)), key=lambda rank: -busy[rank])[:RANKS]
        longest = max(one + other for one, other in zip(busy, wait, strict=True)) or 1.0
        room = max(width - 28, 8)
        lines = [Text(f"ranks in step {now['ranks_step']:,}: own work, and waits for others", "dim", no_wrap=True)]
        for rank in sorted(order):
            own, idle = (round(times[rank] / longest * room) for times in (busy, wait))
            said = f" {busy[rank]:.3g} s + {wait[rank]:.3g} s"
            lines.append(Text.assemble(f"{rank:5} ", ("█" * own, "cyan"), ("░" * idle, "dim"), said, no_wrap=True))
        if len(busy) > len(order):
            lines.append(Text(f"      and {len(busy) - len(order)} ranks that take less", "dim", no_wrap=True))
        return lines

    def close(self) -> None:
        self._live.stop()


def curve(values: Sequence[float], columns: int, rows: int) -> list[str]:
    """`values` from left to right as `rows` lines of `columns` braille characters, of 2 x 4 dots each.

    The lowest value is at the bottom, the highest at the top. Several values of a column of dots are their mean.
    """
    across, down = 2 * columns, 4 * rows
    used = min(len(values), across)
    edges = [place * len(values) // used for place in range(used + 1)]
    means = [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    heights = [round((high - mean) / span * (down - 1)) for mean in means]
    cells = [[0] * columns for _ in range(rows)]
    for place in range(across):
        at = heights[place * used // across]
        before = heights[(place - 1) * used // across] if place else at
        for dot in range(min(at, before), max(at, before) + 1):
            cells[dot // 4][place // 2] |= _DOTS[place % 2][dot % 4]
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
