"""The HTML page: one self-contained file from the collected rows; no network, no library, every text escaped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hone.base.spec import dump_yaml
from hone.report import compare, origin, units
from hone.report.chain import chain, headlines
from hone.report.collect import Line
from hone.report.findings import Finding, findings
from hone.report.sections import SECTIONS, sections_of
from hone.report.sections.base import Section
from hone.report.svg import drawing, el


def render(line: Line) -> str:
    """The page of `line` as HTML text; deterministic."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "show": units.show,
        "exact": units.exact,
        "label": units.label,
        "heading": units.heading,
        "three": units.three,
    }
    environment.globals |= {"headlines": headlines, "technique_words": compare.technique_words, "yaml": dump_yaml}
    shown = sections_of(line)
    found = {cls.id: shown.get(cls.id) for cls in SECTIONS}
    return environment.from_string(_asset("page.html")).render(**vars(_page(line, shown)), **found) + "\n"


@dataclass(frozen=True)
class Page:
    """What assets/page.html shows, except its sections and the functions it calls."""

    line: Line
    anchors: dict[str, str]
    """The anchor of each artifact, by id."""
    css: Markup
    js: Markup
    under: str
    """The line below the title."""
    contents: list[tuple[str, str]]
    """(anchor, name) of every section."""
    findings: list[Finding]
    """Those whose section is on the page."""
    chain: Markup
    machines: list[origin.Origin]
    errors: dict[tuple[str, str], str]
    """An estimate's error in words, by (artifact, figure)."""


def _page(line: Line, shown: dict[str, Section]) -> Page:
    anchors = {row.id: f"artifact-{place}" for place, row in enumerate(line.rows, 1)}
    middle = [(id, section.title) for id, section in shown.items()]
    last = [("repeat", "Commands"), ("artifacts", "Figures"), ("machine", "Machine")]
    contents = [("chain", "Chain"), *middle, *last]
    return Page(
        line=line,
        anchors=anchors,
        css=Markup(stylesheet()),
        js=Markup(_asset("page.js")),
        under=origin.summary(line),
        contents=contents,
        findings=[finding for finding in findings(line) if finding.about in dict(contents)],
        chain=Markup(
            '<div class="wide">{}</div><details class="narrow"><summary>{} artifacts</summary>{}</details>'
        ).format(chain(line, 1080.0, anchors), len(line.rows), chain(line, 358.0, anchors)),
        machines=origin.machines(line),
        errors={(check.row.id, check.figure.name): compare.error_words(check) for check in compare.checks(line)},
    )


def stylesheet() -> str:
    """All styles: the page's, the charts', and the dark colors twice, for the system's setting and for the toggle."""
    dark = _asset("dark.css")
    themes = f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{\n{dark}}} }}\n:root[data-theme="dark"] {{\n{dark}}}'
    printed = f"@media print {{ :root:root:root {{{_light()}}} }}"
    return _asset("page.css").replace("/* dark */", f"{themes}\n{printed}") + _asset("chart.css")


def standalone(svg: Markup, padding: float = 24) -> str:
    """A chart as a separate file: with the light colors and a light background, also for dark pages."""
    width, height = size_of(svg)
    colors = dict(re.findall(r"(--[a-z]+): ([^;]+);", _light()))
    css = re.sub(r"var\((--[a-z]+)\)", lambda name: colors[name.group(1)].replace('"', "'"), _asset("chart.css"))
    css = css.replace("svg {", "text {").replace("svg ", "")
    label = re.search(r'aria-label="([^"]*)"', svg)
    inner = el("g", svg, transform=f"translate({padding:g} {padding:g})")
    ground = el("rect", width="100%", height="100%", rx=10, fill=colors["--paper"])
    return (
        str(
            drawing(
                width + 2 * padding,
                height + 2 * padding,
                Markup(label.group(1)) if label else "",
                el("style", Markup(css)),
                ground,
                inner,
            )
        )
        + "\n"
    )


def size_of(svg: str) -> tuple[float, float]:
    """Width and height of a drawing."""
    found = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg)
    assert found is not None, "every drawing must have a viewBox"
    return float(found.group(1)), float(found.group(2))


def _light() -> str:
    """The light colors, as page.css declares them."""
    found = re.search(r":root \{(.*?)\}", _asset("page.css"), re.DOTALL)
    assert found is not None, "page.css must start with the light colors"
    return found.group(1)


def _asset(name: str) -> str:
    return files("hone.report").joinpath("assets", name).read_text(encoding="utf8")
