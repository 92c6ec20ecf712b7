"""The field `init` of a train spec: random weights, layers of a teacher, or the growths that make its model of a smaller one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hone.base.spec import Spec
from hone.base.table import Choice, Technique
from hone.model.growth import GROWTHS
from hone.model.growth.base import Growth

_WORDS = ("random", "teacher")


class TeacherLayers(Spec):
    """Copies of some of the teacher's layers, and of its embedding, norm and head."""

    kind: Literal["teacher"] = Field("teacher", description="Weights are the teacher's.")
    keep_every: int = Field(2, ge=2, description="Layers 0, n, 2n, ... of the teacher are kept; 2 halves the depth.")


def _read(value: Any) -> Any:
    """`init: stack` and `init: {kind: stack}` for `init: [{kind: stack}]`; `init: teacher` for `init: {kind: teacher}`."""
    if value == "teacher" or (isinstance(value, dict) and value.get("kind") == "teacher"):
        return TeacherLayers() if isinstance(value, str) else TeacherLayers.read(value)
    alone = isinstance(value, dict | Technique) or (isinstance(value, str) and value not in _WORDS)
    return (value,) if alone else value


Init = Annotated[
    Literal["random"] | TeacherLayers | tuple[Annotated[Technique, Choice(GROWTHS)], ...], BeforeValidator(_read)
]


def growths_of(init: Any) -> tuple[Growth, ...]:
    """The growths of an `Init`, in turn; empty: it is something else."""
    return init if isinstance(init, tuple) else ()


def kept_layers(init: Any) -> int | None:
    """Of an `Init` of a teacher's layers, each how manieth is kept; else None."""
    return init.keep_every if isinstance(init, TeacherLayers) else None
