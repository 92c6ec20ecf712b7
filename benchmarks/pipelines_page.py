"""Writes the drawings and the table of formulas of docs/pipelines.md from the simulator: the text around them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hone.cost.pipeline.check import alive_versions
from hone.cost.pipeline.simulate import Costs, simulate
from hone.cost.pipeline.table import Result, Table, deps, results
from hone.parallel.pipeline.draw import text
from hone.parallel.pipeline.schedules import SCHEDULES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "pipelines.md"
SIZES = ((4, 16), (8, 64))
"""Ranks and micro-batches of the table."""
UNEQUAL = Costs(1.0, 1.2, 0.8)
DRAWN = {"naive": 3, "pipedream": 6, "pipedream_vertical": 6}
"""Micro-batches of a drawing; of the others 8."""


class Formula(NamedTuple):
    """What is published of a schedule: `idle(p, n, f, i, w)` in seconds of a rank whose own passes take n (f + i + w)."""

    idle: str
    seconds: Callable[[int, int, float, float, float], float]
    held: str
    activations: Callable[[int, int], float]
    inside: bool = False
    """Whether the published idle time is that between a rank's first and last pass."""
    pairs: bool = False
    """Whether what is published takes a forward and a backward of a pair as one pass, see `in_pairs`."""
    equal: bool = False
    """Whether it holds for equal times of F, I and W alone."""


def _shared(chunks: int) -> Callable[[int, int, float, float, float], float]:
    return lambda p, n, f, i, w: (p - 1) * (f + i + w) / chunks


PUBLISHED = {
    "naive": Formula("n (p-1) (F+I+W)", lambda p, n, f, i, w: n * (p - 1) * (f + i + w), "1", lambda p, n: 1),
    "gpipe": Formula("(p-1) (F+I+W): (p-1)/(n+p-1) of the time", _shared(1), "n", lambda p, n: n),
    "1f1b": Formula("(p-1) (F+I+W): (p-1)/(n+p-1)", _shared(1), "p", lambda p, n: p),
    "interleaved": Formula(
        "(p-1) (F+I+W)/v: (p-1)/(v n+p-1)", _shared(2), "p (1 + (p-1)/(p v))",
        lambda p, n: (2 * (p - 1) + p + 1) / 2,
    ),
    "breadth_first": Formula("(p-1) (F+I+W)/v: (p-1)/(v n+p-1)", _shared(2), "n", lambda p, n: n),
    "zb_h1": Formula("(p-1) (F+I-W)", lambda p, n, f, i, w: (p - 1) * (f + i - w), "p", lambda p, n: p),
    "zb_h2": Formula("(p-1) (F+I-2W)", lambda p, n, f, i, w: (p - 1) * (f + i - 2 * w), "2p-1", lambda p, n: 2 * p - 1, inside=True),
    "zb_v": Formula("0 for F = I = W", lambda p, n, f, i, w: 0.0, "p", lambda p, n: p, inside=True, equal=True),
    "dualpipe": Formula(
        "(p/2-1) (F&B + B - 3W)", lambda p, n, f, i, w: (p / 2 - 1) * (f + 2 * (i + w) - 3 * w), "p+1",
        lambda p, n: p + 1, pairs=True,
    ),
    "dualpipe_v": Formula(
        "(p-1) (F&B + B - 3W), of half stages", lambda p, n, f, i, w: (p - 1) * (f + 2 * (i + w) - 3 * w) / 2, "p + 1/2",
        lambda p, n: p + 0.5, pairs=True,
    ),
    "pipedream": Formula("(p-1) (F+I+W), once a flush", _shared(1), "p", lambda p, n: p),
    "pipedream_vertical": Formula("(p-1) (F+I+W), once a flush", _shared(1), "p", lambda p, n: p),
    "pipedream_2bw": Formula("(p-1) (F+I+W), once a flush", _shared(1), "p", lambda p, n: p),
}  # fmt: skip


def idle(name: str, p: int, n: int, costs: Costs) -> tuple[float, float]:
    """(published, simulated) seconds in which the rank that waits longest does, of a rank's whole share of the layers."""
    formula, table = PUBLISHED[name], SCHEDULES[name](p, n)
    each = (costs.forward, costs.inputs, costs.weights)
    chunks = sum(len(table.held(rank)) for rank in range(p)) / p / (2 if name == "dualpipe" else 1)
    costs, work = Costs(*each), n * sum(each) * chunks
    seconds = in_pairs(table, costs) if formula.pairs else simulate(table, costs).seconds
    found = max(simulate(table, costs).idle) if formula.inside else seconds - work
    return formula.seconds(p, n, *each), found / chunks  # type: ignore[arg-type]


def in_pairs(table: Table, costs: Costs) -> float:
    """Seconds of DualPipe's `table` as published: the two passes of a pair begin when both have their inputs, and end together after
    the seconds of both. The executor, and so `simulate`, runs them one after the other."""
    ended: dict[Result, float] = {}
    free, at = [0.0] * len(table.ranks), [0] * len(table.ranks)
    while any(done < len(ops) for done, ops in zip(at, table.ranks, strict=True)):
        for rank, ops in enumerate(table.ranks):
            while at[rank] < len(ops):
                together = ops[at[rank] : at[rank] + 1 + ops[at[rank]].paired]
                needed = [one for op in together for one in deps(table, op)]
                if any(one not in ended for one in needed):
                    break
                free[rank] = max([free[rank], *(ended[one] for one in needed)]) + sum(map(costs.of, together))
                ended |= dict.fromkeys((one for op in together for one in results(op)), free[rank])
                at[rank] += len(together)
    return max(free)


def held(name: str, p: int, n: int) -> tuple[float, float]:
    """(published, simulated) activations of a rank's whole share of the layers, in micro-batches."""
    table = SCHEDULES[name](p, n)
    chunks = sum(len(table.held(rank)) for rank in range(p)) / p / (2 if name == "dualpipe" else 1)
    return PUBLISHED[name].activations(p, n), max(simulate(table).peaks) / chunks


def idle_table() -> str:
    """A row a schedule: the idle time that is published, and in each case its value beside the simulator's."""
    cases = [(p, n, Costs()) for p, n in SIZES] + [(4, 16, UNEQUAL)]
    heads = ["schedule", "idle seconds of a rank, published"]
    heads += [f"p {p}, n {n}" + (", F 1, I 1.2, W 0.8" if costs is UNEQUAL else "") for p, n, costs in cases]
    lines = [f"| {' | '.join([*heads, 'bubble at p 4, n 16'])} |", "|---" * (len(heads) + 1) + "|"]
    for name, formula in PUBLISHED.items():
        cells = [f"`{name}`", formula.idle]
        for p, n, costs in cases:
            said, found = idle(name, p, n, costs)
            told = "-" if formula.equal and costs is UNEQUAL else f"{said:.4g}"
            cells.append(f"{told} / {found:.4g}")
        bubble = simulate(SCHEDULES[name](4, 16)).bubble  # as the executor runs it
        lines.append(f"| {' | '.join([*cells, f'{bubble:.1%}'])} |")
    return "\n".join(lines)


def memory_table() -> str:
    """A row a schedule: stages, activations as published beside the simulator's, and versions of weights."""
    lines = [
        "| schedule | stages a rank | activations, published | p 4, n 16 | p 8, n 64 | versions of weights, p 4 |",
        "|---" * 6 + "|",
    ]
    for name, formula in PUBLISHED.items():
        table = SCHEDULES[name](4, 16)
        each = str(len(table.held(0))) + (", each on two ranks" if name == "dualpipe" else "")
        found = [" / ".join(f"{one:g}" for one in held(name, p, n)) for p, n in SIZES]
        versions = max(alive_versions(table))
        lines.append(f"| `{name}` | {each} | {formula.held} | {' | '.join(found)} | {versions} |")
    return "\n".join(lines)


def drawing(name: str) -> str:
    """The schedule on 4 ranks, three columns a pass where F, I and W take equal times."""
    table = SCHEDULES[name](4, DRAWN.get(name, 8))
    return f"```text\n{text(simulate(table, Costs(step=1.0)), width=400)}\n```"


def page(written: str) -> str:
    """The page `written` with its generated parts made anew."""
    parts = {
        "idle": idle_table,
        "memory": memory_table,
        **{f"drawing {name}": lambda name=name: drawing(name) for name in SCHEDULES},
    }
    for key, make in parts.items():
        mark = re.compile(rf"(<!-- {re.escape(key)} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert len(mark.findall(written)) == 1, f"docs/pipelines.md has no place for {key}"
        body = make()
        written = mark.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", written)
    return written


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf8")), encoding="utf8")
