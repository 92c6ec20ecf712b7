"""The page's sections: each is a dataclass of what it shows, and names the stages whose artifacts give it.

A new section is a file with such a class, its row in `SECTIONS`, and its part of assets/page.html.
"""

from __future__ import annotations

from hone.report.collect import Line
from hone.report.sections.base import Section
from hone.report.sections.data import Data
from hone.report.sections.effects import Effects
from hone.report.sections.estimates import Estimates
from hone.report.sections.experts import Experts
from hone.report.sections.mixtures import Mixtures
from hone.report.sections.prices import Prices
from hone.report.sections.quality import Quality
from hone.report.sections.samples import Samples
from hone.report.sections.serving import Serving
from hone.report.sections.speeds import Speeds
from hone.report.sections.training import Training

SECTIONS: tuple[type[Section], ...] = (
    Effects,
    Training,
    Experts,
    Quality,
    Speeds,
    Serving,
    Prices,
    Estimates,
    Mixtures,
    Data,
    Samples,
)
"""In the order of the page."""


def sections_of(line: Line) -> dict[str, Section]:
    """The sections that the artifacts of `line` give, by id."""
    found = {cls.id: cls.of(line) for cls in SECTIONS if not cls.stages or line.of(*cls.stages)}
    return {id: section for id, section in found.items() if section is not None}
