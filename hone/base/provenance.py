"""Provenance of an artifact: the version and commit of hone, versions of packages, the time."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_RECORDED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "pyarrow")


def provenance() -> dict[str, Any]:
    """hone's version and commit, package versions, and the current time."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")  # fine enough to order stages by time
    return {**_source(), "time": now.replace("+00:00", "Z")}


def own_version() -> str:
    """The installed version of hone."""
    try:
        return version("hone-llm")
    except PackageNotFoundError:
        return "source"


@cache
def _source() -> dict[str, Any]:
    """The part that does not change while the process runs."""
    packages = {}
    for name in _RECORDED_PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5
        ).stdout.strip()
        dirty = bool(
            subprocess.run(
                [*git, "status", "--porcelain", "--", "."], capture_output=True, text=True, timeout=5
            ).stdout.strip()
        )
    except (OSError, subprocess.TimeoutExpired):
        commit, dirty = "", False
    return {
        "hone": own_version(),
        "commit": commit or None,
        "dirty": dirty,
        "packages": packages,
    }
