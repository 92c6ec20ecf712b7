"""The documentation's links lead somewhere, its site has every page, and the site is built where mkdocs is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of Python."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_every_link_leads_somewhere(path: Path):
    for name, anchor in LINK.findall(path.read_text(encoding="utf8")):
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name}: {name}"
        if anchor:
            assert target.suffix == ".md" and anchor in anchors(target), f"{path.name}: {name}#{anchor}"


def leaves(nav: Any) -> list[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [one for part in (nav.values() if isinstance(nav, dict) else nav) for one in leaves(part)]


def test_the_navigation_has_every_page_once():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf8"), Loader)
    pages = ["index.md", "contributing.md", "changelog.md", *(path.name for path in (ROOT / "docs").glob("*.md"))]
    assert sorted(leaves(config["nav"])) == sorted(pages)
    assert config["strict"] is True and all(value == "warn" for value in config["validation"]["links"].values())


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["", "\n[nowhere](training.md#no-such-part)\n"], ids=["whole", "broken"])
def test_the_site_is_built_and_refuses_a_broken_link(broken: str, tmp_path: Path):
    pytest.importorskip("material", reason="pip install '.[docs]'")
    left_out = shutil.ignore_patterns(".*cache*", ".git", ".venv", "__pycache__", "build", "tests", "work")
    root = shutil.copytree(ROOT, tmp_path / "root", ignore=left_out)
    with open(root / "docs" / "plans.md", "a") as page:
        page.write(broken)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    if broken:
        assert done.returncode != 0 and "no-such-part" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    site = root / "build" / "site"
    assert (site / "index.html").is_file() and (site / "tiny.svg").is_file()
    assert "RoundToNearest" in (site / "source/hone/compress/quantizers/rtn.py/index.html").read_text(encoding="utf8")
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf8"))
        assert not loaded, f"{page.relative_to(site)} loads {loaded} from another server"
