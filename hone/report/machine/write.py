"""Writes the report of a machine into the folder of its probe: index.html, one self-contained page, and report.md."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hone.base.durable import write_atomic
from hone.report.machine.parts import findings, parts
from hone.report.machine.reading import Found, read
from hone.report.markdown import escape, table
from hone.report.page import stylesheet


def build(folder: Path | str) -> Path:
    """Reads probe.json and calibration.json in `folder` and writes the report beside them; returns the path of index.html.

    Raises ArtifactError where they cannot be read. The same files give the same bytes.
    """
    folder = Path(folder)
    found = read(folder)
    write_atomic(folder / "report.md", markdown(found).encode())
    write_atomic(folder / "index.html", page(found).encode())
    return folder / "index.html"


def under(found: Found) -> str:
    """The line below the title."""
    gpus = Counter(gpu["name"] for gpu in found.rows("gpus"))
    nodes = len(found.probe["topology"]["nodes"])
    said = [
        f"{nodes} NUMA nodes" if nodes > 1 else "one NUMA node",
        *(f"{count} x {name}" if count > 1 else name for name, count in gpus.items()),
    ]
    when = found.probe["made_at"].replace("T", " ").replace("+00:00", " UTC")
    return f"{', '.join(said)}. Measured {when} in {found.probe.get('seconds', 0):.0f} s{', quick' if found.probe.get('quick') else ''}."


def page(found: Found) -> str:
    """The page as HTML text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = files("hone.report").joinpath("assets", "machine.html").read_text(encoding="utf8")
    script = files("hone.report").joinpath("assets", "page.js").read_text(encoding="utf8")
    made = environment.from_string(template).render(
        title=found.probe["processor"],
        under=under(found),
        css=Markup(stylesheet()),
        js=Markup(script),
        findings=findings(found),
        parts=parts(found),
    )
    return made + "\n"


def markdown(found: Found) -> str:
    """The tables as Markdown text."""
    lines = [f"# {escape(found.probe['processor'])}", "", escape(under(found)), ""]
    lines += [f"- **{escape(value)}** {escape(words)}" for value, words, _ in findings(found)]
    for part in parts(found):
        lines += ["", f"## {part.title}", "", *([escape(part.lead), ""] if part.lead else [])]
        lines += [f"- {escape(entry)}" for entry in part.list]
        for grid in part.grids:
            rows = [[escape(cell) for cell in row] for row in grid.rows]
            lines += ["", f"### {escape(grid.title)}", "", *table([*grid.head], rows, grid.numbers)]
    return "\n".join(lines) + "\n"
