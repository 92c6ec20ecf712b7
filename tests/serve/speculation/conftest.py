"""Draft heads of the small model, trained once for all files here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.small import decoder
from tests.serve.speculation.heads import KINDS, OPTIONS, taught


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("heads")
    return {kind: taught(where / kind, kind, decoder(), 61, **OPTIONS[kind]) for kind in KINDS}
