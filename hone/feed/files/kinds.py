"""Kinds: the format and compression of a file by the endings of its name."""

from __future__ import annotations

from pathlib import Path

from hone.feed.files.code import LANGUAGES

FORMATS: dict[str, str] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".zip": "zip",
    ".tar": "tar",
    ".warc": "warc",
    ".wet": "warc",
    ".arc": "warc",
    ".pdf": "pdf",
    ".docx": "docx",
    ".odt": "odt",
    ".epub": "epub",
    ".xml": "xml",
    ".ipynb": "ipynb",
    ".tex": "tex",
    ".latex": "tex",
    ".eml": "eml",
    ".mbox": "mbox",
    **dict.fromkeys(LANGUAGES, "code"),
}
"""Reader of each file suffix; each may be followed by one of COMPRESSIONS, except those of SEEKING."""
UNKNOWN = "unknown"
"""Format of a file without an ending, which is recognized by its content when it is read."""
NAMES = tuple(sorted(set(FORMATS.values())))
"""The formats, one of which `format` of the data stage may force."""
CONTAINERS = ("zip", "tar")
TABLES = ("jsonl", "json", "csv", "parquet", "arrow")
"""Formats of which a document is a row."""
SEEKING = ("parquet", "arrow", "zip", "docx", "odt", "epub")
"""Formats with an index at the end: not read from a compressed stream."""
COMPRESSIONS = {".gz": ".gz", ".zst": ".zst", ".zstd": ".zst", ".bz2": ".bz2", ".xz": ".xz"}
"""Compression of each last suffix."""
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".tbz": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}

READABLE = " ".join(ending for ending, format in FORMATS.items() if format != "code")
"""Endings that are read, for messages."""


def kind_of(name: str, forced: str = "") -> tuple[str, str] | None:
    """(format, compression) of a file by its name, None for an ending of no known format; UNKNOWN without an ending.

    `forced` is the format of every file that is no container.
    """
    base = name.rsplit("/", 1)[-1].lower()
    for short, long in _SHORT.items():
        if base.endswith(short):
            base = base.removesuffix(short) + long
    last = next((ending for ending in COMPRESSIONS if base.endswith(ending)), "")
    bare, compression = base.removesuffix(last), COMPRESSIONS.get(last, "")
    ending = bare[bare.rfind(".") :] if "." in bare[1:] else ""
    found = FORMATS.get(ending, "" if ending else UNKNOWN)
    if forced:
        return (found if found in CONTAINERS and forced not in CONTAINERS else forced), compression
    return (found, compression) if found and not (compression and found in SEEKING) else None


def ending_of(name: str) -> str:
    """The ending by which a skipped file is counted."""
    return Path(name).suffix.lower() or "(no ending)"
