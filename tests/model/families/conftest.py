"""Folders of small models with published configs, made by transformers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.model.families.published import PUBLISHED, SMALL, make_folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """A folder with the published config.json (transformers 4) and random weights, as transformers names them."""

    @functools.cache
    def make(name: str) -> Path:
        return make_folder(tmp_path_factory.mktemp(name), {**PUBLISHED[name], **SMALL}, std=0.2)

    return make
