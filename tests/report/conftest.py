"""Lines of invented artifacts, written once and copied by tests that break something in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.lines import write_line


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole line as the tiny recipe makes it; read only."""
    return write_line(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same line with markup in its texts and commands, on a machine with an energy sensor; read only."""
    return write_line(tmp_path_factory.mktemp("hostile") / "tiny", energy=True, hostile=True)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Callable[..., Path]:
    """copy(*ids): a line of one's own with only the artifacts named, or with all."""

    def make(*ids: str) -> Path:
        folder = tmp_path / "tiny"
        keep = set(ids)
        shutil.copytree(
            whole, folder, ignore=lambda top, names: [n for n in names if Path(top) == whole and keep and n not in keep]
        )
        return folder

    return make
