"""A calculation as lines: each a formula, its numbers, its value and its paper. The value is what the formula evaluates to."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hone.base.figure import human_bytes, human_seconds
from hone.base.spec import Spec

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
}


class Line(NamedTuple):
    """One result: `formula` with `numbers` gives `value`."""

    name: str
    formula: str
    numbers: dict[str, float]
    value: float
    unit: str
    source: str

    @property
    def substituted(self) -> str:
        """The formula with its numbers in place of its names."""
        named = re.sub(r"[A-Za-z_]\w*", lambda found: self._number(found[0]), self.formula)
        return _typeset(named)

    @property
    def written(self) -> str:
        """The formula as it is read."""
        return _typeset(self.formula)

    @property
    def shown(self) -> str:
        """The value with its unit."""
        if self.unit == "B":
            return f"{human_bytes(self.value)} ({_decimal_bytes(self.value)})"
        if self.unit == "s":
            return human_seconds(self.value) if self.value >= 1 else f"{self.value * 1e3:.4g} ms"
        if self.unit == "%":
            return f"{100 * self.value:.4g} %"
        return f"{number(self.value)} {self.unit}".rstrip()

    def _number(self, name: str) -> str:
        return number(self.numbers[name]) if name in self.numbers else name


@dataclass
class Sheet:
    """The lines of a calculation, in the order in which they were added, and what follows from them in words."""

    title: str
    lines: list[Line] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    def add(
        self, name: str, formula: str, unit: str = "", source: str = "", value: float | None = None, **numbers: float
    ) -> float:
        """Adds what `formula` gives for `numbers` and returns it. `value` is what other code of hone gives for the same, to agree."""
        found = evaluate(formula, numbers)
        assert value is None or math.isclose(found, value, rel_tol=1e-9), f"{name}: {formula} is {found}, not {value}"
        self.lines.append(Line(name, formula, numbers, found, unit, source))
        return found

    def __getitem__(self, name: str) -> float:
        """The value of the line `name`."""
        return next(one.value for one in self.lines if one.name == name)

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        rows = [{**one._asdict(), "substituted": one.substituted} for one in self.lines]
        return {"title": self.title, "lines": rows, "verdicts": self.verdicts}


class Calculator(Spec):
    """A calculation whose numbers are its fields."""

    def sheet(self) -> Sheet:
        """The calculation. Raises SpecError for numbers that do not go together."""
        raise NotImplementedError


def evaluate(formula: str, numbers: dict[str, float]) -> float:
    """The value of `formula`, sums, products, powers, min, max, ceil, floor and sqrt of numbers and of the names in `numbers`."""
    return float(_value(ast.parse(formula, mode="eval").body, numbers))


def _value(node: ast.expr, numbers: dict[str, float]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return numbers[node.id]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, numbers))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _FUNCTIONS[node.func.id](*(_value(one, numbers) for one in node.args))
    raise AssertionError(f"a formula has {ast.dump(node)}")


def number(value: float) -> str:
    """A number as it is read: whole ones to seven digits, others to four."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return re.sub(r"e\+?(-?)0*(\d+)", r"e\1\2", f"{value:.4g}")


def _typeset(formula: str) -> str:
    return formula.replace(" ** ", "^").replace("**", "^").replace(" * ", " \u00b7 ")


def _decimal_bytes(value: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.4g} B"
