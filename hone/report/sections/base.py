"""What a section of the page is, and a chart in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol, Self

from markupsafe import Markup

from hone.report.collect import Line

FULL, HALF, PHONE = 1098.0, 516.0, 326.0
"""Chart widths in pixels: the full width of the page, half of it, a phone."""


class Section(Protocol):
    """A part of the page, computed from the artifacts of some stages; a dataclass whose fields are what the page shows."""

    id: ClassVar[str]
    """Its anchor on the page."""
    title: ClassVar[str]
    """Its name in the list of sections."""
    stages: ClassVar[tuple[str, ...]]
    """The stages whose artifacts give it; (): any."""

    @classmethod
    def of(cls, line: Line) -> Self | None:
        """The section of `line`; None where its artifacts give nothing to show."""
        ...


class Panel(NamedTuple):
    """A chart with its title and a sentence about it; `chart` is empty where there is only something to say."""

    title: str
    chart: Markup
    words: str = ""


def both(draw: Callable[[float], Markup], wide: float = HALF) -> Markup:
    """A chart drawn twice, for a wide and for a narrow screen; the style sheet shows one of them."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(wide), draw(PHONE))
