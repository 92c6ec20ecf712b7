"""`hone cost WORD`: a calculator by its word; each prints its formulas with the numbers in them, and the result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hone.cli.options import fields, list_fields

if TYPE_CHECKING:
    from hone.cost.calculators.sheet import Sheet

WORDS: dict[str, str] = {
    "flops": "hone.cost.calculators.flops:Flops",
    "train": "hone.cost.calculators.train:TrainMemory",
    "zero": "hone.cost.calculators.zero:Zero",
    "comm": "hone.cost.calculators.comm:Communication",
    "bubble": "hone.cost.calculators.bubble:Bubble",
    "serve": "hone.cost.calculators.serve:ServeMemory",
    "kv": "hone.cost.calculators.kv:KV",
    "waste": "hone.cost.calculators.waste:Waste",
    "remote": "hone.cost.calculators.remote:Remote",
    "speculate": "hone.cost.calculators.speculate:Speculate",
    "bits": "hone.cost.calculators.bits:Bits",
    "models": "hone.cli.cost.verb:models",
    "money train": "hone.cost.money.training:TrainingMoney",
    "money serve": "hone.cost.money.serving:ServingMoney",
    "money roi": "hone.cost.money.roi:Return",
    "money checkpoints": "hone.cost.money.checkpoints:Checkpoints",
    "money spot": "hone.cost.money.spot_sheet:SpotMoney",
    "carbon": "hone.cost.carbon.footprint:Footprint",
    "size": "hone.cost.scaling.sizes:Size",
}
"""What each word runs, imported on use: a `Calculator`, or a function `(words, options) -> exit code` whose first word is 'cost WORD'.

Its module's first line says after `hone cost WORD`: what it computes.
"""


def cost(words: list[str], options: dict[str, str]) -> int:
    """Runs the calculator that the first word names; returns its exit code."""
    from hone.base.errors import SpecError, did_you_mean
    from hone.base.lazy import resolve

    if len(words) < 2:
        if unknown := [name for name in options if name != "help"]:
            raise SpecError(f"hone cost has no option --{unknown[0]} without a word", fix="hone cost --help lists them")
        print(f"usage: hone cost WORD [--field=value ...]\n\n{_lines()}")
        print("\nhone cost WORD --help lists the fields of a word; --json prints the result for a program.")
        return 0
    word = " ".join(words[1:3])
    if word in WORDS:  # a word of two: what follows moves up
        words = [words[0], word, *words[3:]]
    elif not any(one.startswith(f"{words[1]} ") for one in WORDS):
        word = words[1]
    if group := [one for one in WORDS if one.startswith(f"{words[1]} ")] if len(words) == 2 else []:
        if unknown := [name for name in options if name != "help"]:
            raise SpecError(f"hone cost {words[1]} has no option --{unknown[0]}", fix=f"its words: {', '.join(group)}")
        print(f"usage: hone cost {words[1]} WORD [--field=value ...]\n\n{_lines(group)}")
        return 0
    if word not in WORDS:
        raise SpecError(
            f"hone cost has no word '{word}'", fix=f"{did_you_mean(word, WORDS, 'hone cost {}')}hone cost lists them"
        )
    found, rest = resolve(WORDS[word]), [f"cost {word}", *words[2:]]
    return _calculate(found, rest, options) if isinstance(found, type) else found(rest, options)


def models(words: list[str], options: dict[str, str]) -> int:
    """Lists the known models."""
    from hone.cli.options import at_most, only
    from hone.cost.calculators.model import shapes

    only(words, options, ("json", "help"))
    at_most(words, 0, "no argument")
    if "json" in options:
        print(json.dumps(shapes(), indent=1))
        return 0
    for name, one in shapes().items():
        experts = f", {one['experts_per_token']} of {one['experts']} experts" if "experts" in one else ""
        print(
            f"{name:14} {one['layers']} layers, hidden {one['hidden_size']}, {one['heads']} heads ({one['kv_heads']} of keys) of "
            f"{one['head_dim']}, feed-forward {one['intermediate_size']}{experts}, vocabulary {one['vocab_size']} ({one['source']})"
        )
    return 0


def _calculate(cls: Any, words: list[str], options: dict[str, str]) -> int:
    """Prints the sheet of the calculator `cls` for the fields in `options`."""
    from hone.cli.options import at_most

    at_most(words, 0, "options alone")
    if "help" in options:
        print(f"usage: hone {words[0]} [--field=value ...] [--json]\n\n{cls.__doc__}\n\nfields:\n{list_fields(cls)}")
        return 0
    sheet = cls.from_overrides(fields(options, "json")).sheet()
    if "json" in options:
        print(json.dumps(sheet.as_dict(), indent=1))
    else:
        _print(sheet)
    return 0


def _print(sheet: Sheet) -> None:
    """Prints every line: its name and value, its formula and its numbers in it, its paper."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    papers = [*dict.fromkeys(line.source for line in sheet.lines if line.source)]
    for line in sheet.lines:
        formula = line.written if line.written == line.substituted else f"{line.written} = {line.substituted}"
        cited = f"  [{papers.index(line.source) + 1}]" if line.source else ""
        table.add_row(line.name, line.shown, f"= {formula}{cited}")
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, 100)
    console.print(sheet.title)
    console.print(table)
    for one in sheet.verdicts:
        console.print(one, soft_wrap=True)
    for place, one in enumerate(papers, 1):
        console.print(f"[{place}] {one}", soft_wrap=True)


def _lines(words: Iterable[str] = WORDS) -> str:
    """Every word with the first line of its module."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    found = []
    for word in words:
        spec = find_spec(WORDS[word].partition(":")[0])
        text = Path(spec.origin).read_text(encoding="utf8") if spec is not None and spec.origin else ""
        about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        about = about.partition(f"`hone cost {word}`: ")[2] or ("the known models" if word == "models" else about)
        found.append(f"  {word:18} {about}")
    return "\n".join(found)
