"""The field `init` of a train spec: a word, or the growths that make its model of a smaller one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hone.base.table import Choice, Technique
from hone.model.growth import GROWTHS
from hone.model.growth.base import Growth

_WORDS = ("random", "teacher")


def _as_list(value: Any) -> Any:
    """`init: stack` and `init: {kind: stack}` for `init: [{kind: stack}]`."""
    alone = isinstance(value, dict | Technique) or (isinstance(value, str) and value not in _WORDS)
    return (value,) if alone else value


Init = Annotated[
    Literal["random", "teacher"] | tuple[Annotated[Technique, Choice(GROWTHS)], ...], BeforeValidator(_as_list)
]


def growths_of(init: Any) -> tuple[Growth, ...]:
    """The growths of an `Init`, in turn; empty: it is a word."""
    return () if isinstance(init, str) else init
