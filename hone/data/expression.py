"""Expressions over signal columns, as text: `words >= 50 and kind != 'code'`, evaluated on whole numpy columns at once."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from hone.base.errors import SpecError, did_you_mean
from hone.data import predicates

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

    Allowed: column names, numbers, strings, comparisons (chained too), `in` a tuple or `in file('list')`, the functions of
    predicates.py, and, or, not, + - * / %.
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
    _need_truth(parse(text), text, kinds)


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
            if isinstance(rights[0], ast.Call) and isinstance(ops[0], ast.In | ast.NotIn):
                if _kind(left, text, kinds) == "number":
                    raise _senseless(text, f"'{ast.unparse(left)}' is a number", "look for texts in a list file")
                return "number"
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
        case ast.Call(func=ast.Name(id=function), args=[column, *_]):
            if _kind(column, text, kinds) == "number":
                raise _senseless(text, f"'{ast.unparse(column)}' is a number", f"give {function} a column of text")
            return predicates.FUNCTIONS[function]
        case ast.Name(id=name):
            return kinds.get(name, "")
        case ast.Constant(value=value):
            return "text" if isinstance(value, str) else "number"
    raise AssertionError(f"_check let {ast.dump(node)} through")


def _senseless(text: str, why: str, fix: str) -> SpecError:
    return SpecError(f"'{text}' cannot be evaluated: {why}", fix=fix)


def columns_of(text: str) -> set[str]:
    """Names of the columns that `text` uses."""
    tree = parse(text)
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions}


def files_of(text: str) -> list[str]:
    """The list files that `text` names, in order."""
    calls = [node for node in ast.walk(parse(text)) if isinstance(node, ast.Call)]
    return [call.args[0].value for call in calls if _is_file(call)]  # type: ignore[attr-defined, misc]


def _is_file(node: ast.expr) -> bool:
    """Whether `node` is file('name')."""
    match node:
        case ast.Call(func=ast.Name(id="file"), args=[ast.Constant(value=str())], keywords=[]):
            return True
    return False


def evaluate(text: str, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """`text` over `columns` (each [n]) as a bool array [n]. Raises SpecError for an unknown column or a type that does not match."""
    tree = parse(text)
    for name in sorted(columns_of(text)):
        if name not in columns:
            if name == "text":
                raise SpecError(
                    f"'{text}' reads texts, which are not at hand here",
                    fix="use it in a filter of the stage; it cannot be decided again",
                )
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
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]) if _is_file(right):
            parts = [left]
        case ast.Call(func=ast.Name(id=name), args=[ast.Name() as column, *words], keywords=[]) if (
            name in predicates.FUNCTIONS
        ):
            _check_call(name, words, text)
            parts = [column]
        case ast.Call():
            functions = ", ".join(
                f"{name}({'url' if kind == 'text' else 'url, ..'})" for name, kind in predicates.FUNCTIONS.items()
            )
            raise SpecError(
                f"'{text}': '{ast.unparse(node)}' is no function of expressions",
                fix=f"use {functions} of a column, and `in file('list')`",
            )
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
                fix="use column names, numbers, strings, comparisons, `in (..)`, functions such as contains(url, 'word'), and, or, not, + - * / %",
            )
    for part in parts:
        _check(part, text)


def _check_call(name: str, words: list[ast.expr], text: str) -> None:
    """Raises SpecError unless the arguments after the column are what function `name` takes."""
    strings = [word for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value]
    takes_files = name in ("words_in", "subwords_in")
    good = all(word in strings or (takes_files and _is_file(word)) for word in words)
    if predicates.FUNCTIONS[name] == "text":
        good = not words
    elif name == "matches":
        good = good and len(words) == 1
    else:
        good = good and bool(words)
    if not good:
        takes = {"domain": "url", "page": "url", "matches": "url, 'expression'"}.get(name, "url, 'word', 'other'")
        raise SpecError(f"'{text}': {name} does not take these arguments", fix=f"write {name}({takes})")
    if name == "matches":
        predicates.check_pattern(strings[0].value, text)  # type: ignore[arg-type]


def _words(nodes: list[ast.expr]) -> tuple[str, ...]:
    """The strings of arguments, those of files included."""
    return tuple(
        word
        for node in nodes
        for word in (predicates.entries(node.args[0].value) if isinstance(node, ast.Call) else [node.value])  # type: ignore[attr-defined]
    )


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
            if isinstance(right, ast.Call):
                what = left.func.id if isinstance(left, ast.Call) else ""  # type: ignore[attr-defined]
                found = predicates.listed(value, right.args[0].value, what)  # type: ignore[attr-defined]
                return ~found if isinstance(op, ast.NotIn) else found
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
        case ast.Call(func=ast.Name(id=name), args=[column, *words]):
            return predicates.call(name, _value(column, columns), _words(words))
        case ast.Name(id=name):
            return columns[name]
        case ast.Constant(value=value):
            return value
    raise AssertionError(f"_check let {ast.dump(node)} through")
