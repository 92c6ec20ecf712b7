"""Rules of an integer quantizer: bits and group size of the matrices whose names match a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from pydantic import Field, field_validator, model_validator

from hone.base.errors import SpecError
from hone.base.spec import Spec
from hone.compress.targets import matches, nothing_matched

if TYPE_CHECKING:
    from hone.compress.targets import Linear


class Rule(Spec):
    """Bits, group size or both of the matrices that a pattern matches."""

    match: str = Field(
        description="Regular expression found in a linear's checkpoint name, or from its start 're:.*down_proj'."
    )
    bits: int | None = Field(None, ge=2, le=8, description="Bits per weight; empty: the quantizer's.")
    group_size: int | None = Field(
        None, ge=0, description="Columns that share a scale, 0 for one scale per row; empty: the quantizer's."
    )

    @field_validator("match")
    @classmethod
    def _expression(cls, match: str) -> str:
        try:
            re.compile(match.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return match

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.bits is None and self.group_size is None:
            raise ValueError("a rule gives bits, group_size or both; to leave a matrix unchanged name it in ignore")
        return self

    @property
    def options(self) -> dict[str, int]:
        """What it gives, by the quantizer's field."""
        return self.model_dump(include={"bits", "group_size"}, exclude_none=True)


def options_of(rules: Sequence[Rule], name: str) -> dict[str, int]:
    """What the first rule that matches a checkpoint module gives it; nothing where none does."""
    return next((rule.options for rule in rules if matches(rule.match, name)), {})


def check(rules: Sequence[Rule], targets: Iterable[Iterable[Linear]]) -> None:
    """Raises SpecError for a rule that no linear of `targets` follows, and for modules of one matrix that differ."""
    linears = [linear for layer in targets for linear in layer]
    names = [name for linear in linears for name, _ in linear.modules]
    for place, rule in enumerate(rules):
        matched = [name for name in names if matches(rule.match, name)]
        if not matched:
            raise nothing_matched(f"rules.{place}: '{rule.match}'", rule.match, names, "the linears that are quantized")
        if not any(next(one for one in rules if matches(one.match, name)) is rule for name in matched):
            raise SpecError(
                f"rules.{place}: '{rule.match}' is never used: rules before it match {matched[0]} and all others that it matches",
                fix="the first rule that matches holds: put it before the more general ones",
            )
    for linear in linears:
        given = {name: options_of(rules, name) for name, _ in linear.modules}
        if any(one != given[linear.modules[0][0]] for one in given.values()):
            said = ", ".join(f"{name} {_words(one)}" for name, one in given.items())
            raise SpecError(
                f"rules give modules of one matrix different options: {said}",
                fix="these are one matrix, as in vLLM: match them together, "
                f"as 're:.*({'|'.join(name.rpartition('.')[2] for name in given)})'",
            )


def lines(rules: Sequence[Rule], targets: Iterable[Iterable[Linear]]) -> tuple[str, ...]:
    """A line a rule: what it gives, and to how many matrices."""
    names = [linear.modules[0][0] for layer in targets for linear in layer]
    found = []
    for rule in rules:
        count = sum(next((one for one in rules if matches(one.match, name)), None) is rule for name in names)
        found.append(f"rule {rule.match}: {_words(rule.options)} for {count} of {len(names)} matrices")
    return tuple(found)


def _words(options: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "as the others"
