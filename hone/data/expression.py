"""Expressions over signal columns, as text: `words >= 50 and kind != 'code'`, evaluated on whole numpy columns at once."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from hone.base.errors import SpecError, did_you_mean

_COMPARE = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


def parse(text: str) -> ast.expr:
    """The syntax tree of `text`. Raises SpecError when it is not an expression or uses other syntax than allowed.

    Allowed: column names, numbers, strings, comparisons (chained too), `in` a tuple, and, or, not, + - * / %.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SpecError(
            f"'{text}' is not an expression: {error}", fix="write one such as: words >= 50 and kind != 'code'"
        ) from None
    _check(tree, text)
    return tree


def need_sense(text: str, kinds: Mapping[str, str]) -> None:
    """Raises SpecError where `text` compares strings with numbers, calculates with strings, or has no truth value.

    `kinds` maps columns to 'text' or 'number'; other columns are not checked. numpy raises no error for `language == 5`, which
    is false for every document.
    """
    tree = parse(text)
    _need_truth(tree, text, kinds)


def _need_truth(node: ast.expr, text: str, kinds: Mapping[str, str]) -> None:
    if _kind(node, text, kinds) == "text":
        raise _senseless(text, f"'{ast.unparse(node)}' is text, not true or false", "compare it with another text")


def _kind(node: ast.expr, text: str, kinds: Mapping[str, str]) -> str:
    """'text', 'number' (also for a truth value) or '' for an unknown kind; raises SpecError where kinds do not match."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _need_truth(value, text, kinds)
            return "number"
        case ast.UnaryOp(operand=operand):
            _need_truth(operand, text, kinds)
            return "number"
        case ast.BinOp(left=left, right=right):
            for part in (left, right):
                if _kind(part, text, kinds) == "text":
                    raise _senseless(text, f"'{ast.unparse(part)}' is text", "calculate with numbers only")
            return "number"
        case ast.Compare(left=left, ops=ops, comparators=rights):
            if isinstance(ops[0], ast.In | ast.NotIn):
                pairs = [(left, choice) for choice in rights[0].elts]  # type: ignore[attr-defined]
            else:
                pairs = list(zip([left, *rights], rights))
            for one, other in pairs:
                found = {_kind(part, text, kinds): part for part in (one, other)}
                if {"text", "number"} <= found.keys():
                    words, number = ast.unparse(found["text"]), ast.unparse(found["number"])
                    raise _senseless(
                        text,
                        f"'{words}' is text, '{number}' is a number",
                        "compare numbers with numbers, text with 'text'",
                    )
            return "number"
        case ast.Name(id=name):
            return kinds.get(name, "")
        case ast.Constant(value=value):
            return "text" if isinstance(value, str) else "number"
    raise AssertionError(f"_check let {ast.dump(node)} through")


def _senseless(text: str, why: str, fix: str) -> SpecError:
    return SpecError(f"'{text}' cannot be evaluated: {why}", fix=fix)


def columns_of(text: str) -> set[str]:
    """Names of the columns that `text` uses."""
    return {node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)}


def evaluate(text: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """`text` over `columns` (each [n]) as a bool array [n]. Raises SpecError for an unknown column or a type that does not match."""
    tree = parse(text)
    for name in sorted(columns_of(text)):
        if name not in columns:
            hint = did_you_mean(name, columns)
            raise SpecError(
                f"'{text}': there is no signal column '{name}'", fix=f"{hint}the columns are: {', '.join(columns)}"
            )
    need_sense(text, {name: "text" if columns[name].dtype.kind in "OSU" else "number" for name in columns_of(text)})
    length = len(next(iter(columns.values())))
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.asarray(_value(tree, columns))
            if value.dtype.kind not in "biuf":
                raise TypeError("its value is text, not true or false")
            return np.broadcast_to(value.astype(bool), (length,))
    except (TypeError, ValueError) as error:  # numpy's UFuncNoLoopError is a TypeError
        raise SpecError(
            f"'{text}' cannot be evaluated: {error}", fix="compare numbers with numbers and strings with strings"
        ) from None


def _check(node: ast.expr, text: str) -> None:
    """Raises SpecError unless `node` consists of allowed syntax."""
    match node:
        case ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
            parts = [part]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            parts = [left, right]
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[ast.Tuple() | ast.List() as right]):
            parts = [left, *right.elts]
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Constant() | ast.Name() as right]):
            raise SpecError(
                f"'{text}': `in` needs a list, and brackets around one value make none",
                fix=f"write a comma after it: ({ast.unparse(right)},)",
            )
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARE for op in ops):
            parts = [left, *rights]
        case ast.Name():
            parts = []
        case ast.Constant(value=bool() | int() | float() | str()):
            parts = []
        case _:
            raise SpecError(
                f"'{text}' uses {type(node).__name__}, which is not allowed in an expression",
                fix="use column names, numbers, strings, comparisons, `in (..)`, and, or, not, + - * / %",
            )
    for part in parts:
        _check(part, text)


def _value(node: ast.expr, columns: Mapping[str, np.ndarray]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            result = _value(values[0], columns)
            for value in values[1:]:
                result = join(result, _value(value, columns))
            return result
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_value(operand, columns))
        case ast.UnaryOp(operand=operand):
            return -_value(operand, columns)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_value(left, columns), _value(right, columns))
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[right]):
            value = _value(left, columns)
            found = np.zeros(np.shape(value), bool)
            for choice in right.elts:  # type: ignore[attr-defined]
                found = found | (value == _value(choice, columns))
            return ~found if isinstance(op, ast.NotIn) else found
        case ast.Compare(left=left, ops=ops, comparators=rights):
            result: Any = True
            before = _value(left, columns)
            for op, right in zip(ops, rights):
                after = _value(right, columns)
                result = np.logical_and(result, _COMPARE[type(op)](before, after))
                before = after
            return result
        case ast.Name(id=name):
            return columns[name]
        case ast.Constant(value=value):
            return value
    raise AssertionError(f"_check let {ast.dump(node)} through")
