"""Hooks of mkdocs: README.md is the site's first page, and what pages link to outside docs/ is on the site, too.

A file becomes a page with its text, a folder a page that lists its files. Links are as on a code host, relative to the file they
are in, and are rewritten here; one that leads nowhere stays as it is, and the strict build refuses it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the root that are pages of the site."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".service": "ini"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that docs/ does not hold."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf8")))
    wanted = {target for path in sources() for target in links(path) if place(target) == source(target)}
    for target in sorted(wanted | {one for folder in wanted if folder.is_dir() for one in listed(folder)}):
        files.append(File.generated(config, source(target), content=shown(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page that comes from a file of the repository."""
    here = next((ROOT / name for name, made in PAGES.items() if made == page.file.src_uri), None)
    if here is None:
        here = ROOT / "docs" / page.file.src_uri
    if not here.exists():  # a page made above: its links are the site's already
        return markdown

    def moved(found: re.Match[str]) -> str:
        target = (here.parent / found[1]).resolve()
        if not target.exists():
            return found[0]
        return os.path.relpath(place(target), Path(page.file.src_uri).parent) + (found[2] or "")

    return spaced(LINK.sub(moved, markdown))


def spaced(markdown: str) -> str:
    """With a blank line before each list and table, which code hosts do without and Python's markdown needs."""
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        before = lines[-1] if lines else ""
        if not fenced and before.strip() and line.startswith(("- ", "|")) and not before.startswith((line[0], "  ")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def sources() -> list[Path]:
    """The files that pages are made of."""
    return [*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").glob("*.md"))]


def links(path: Path) -> set[Path]:
    """The files and folders that `path` links to."""
    found = {(path.parent / one[1]).resolve() for one in LINK.finditer(path.read_text(encoding="utf8"))}
    return {target for target in found if target.exists()}


def place(target: Path) -> str:
    """The path of `target` among the site's sources."""
    name = target.relative_to(ROOT).as_posix()
    return PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else source(target))


def source(target: Path) -> str:
    """The page of a file or folder outside docs/."""
    return f"source/{target.relative_to(ROOT).as_posix()}.md"


def listed(folder: Path) -> list[Path]:
    """The text files of a folder; those of the ledger are long, and only their names are shown."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".jsonl"]


def shown(target: Path) -> str:
    """The page of a file or folder."""
    title = f"# {target.relative_to(ROOT).as_posix()}\n\n"
    if target.is_dir():
        shown_files = listed(target)
        names = [path.name for path in sorted(target.iterdir()) if path.is_file()]
        known = {path.name for path in shown_files}
        return title + "\n".join(
            f"- [{name}]({target.name}/{name}.md)" if name in known else f"- {name}" for name in names
        )
    language = LANGUAGES.get(target.suffix, "text")
    return f"{title}``````{language}\n{target.read_text(encoding='utf8')}\n``````\n"
