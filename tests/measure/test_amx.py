"""The limit of oneDNN on machines that announce AMX without tiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hone.measure import amx

PRODUCT = "import torch; a = torch.ones(64, 64).bfloat16(); print(float((a @ a).float().sum()))"


@pytest.fixture
def unset(monkeypatch):
    for name in amx._SETTINGS:
        monkeypatch.setenv(name, "x")  # so that the test's end restores what is set below
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("announced", "palettes", "limit"), [(True, 0, "AVX512_CORE_FP16"), (True, 1, None), (False, 0, None)]
)
def test_only_announced_tiles_without_a_palette_are_avoided(unset, monkeypatch, announced, palettes, limit):
    monkeypatch.setattr(amx, "_announces_tiles", lambda: announced)
    monkeypatch.setattr(amx, "_num_palettes", lambda: palettes)
    amx.avoid_undescribed_tiles()
    assert amx.cpu_isa_limit() == limit


@pytest.mark.parametrize("name", amx._SETTINGS)
def test_a_limit_that_the_user_has_set_stays(unset, monkeypatch, name):
    monkeypatch.setattr(amx, "_announces_tiles", lambda: True)
    monkeypatch.setattr(amx, "_num_palettes", lambda: 0)
    monkeypatch.setenv(name, "AVX2")
    amx.avoid_undescribed_tiles()
    assert {key: os.environ[key] for key in amx._SETTINGS if key in os.environ} == {name: "AVX2"}


def test_this_machine_multiplies_bfloat16_after_importing_hone():
    environment = {key: value for key, value in os.environ.items() if key not in amx._SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", f"import hone; {PRODUCT}"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(64.0**3)), done.stderr[-2000:]


@pytest.mark.skipif(not amx._announces_tiles(), reason="the processor announces no AMX")
def test_where_tiles_have_a_palette_nothing_needs_a_limit():
    """And a torch whose oneDNN is mended needs none anywhere: then this module can go."""
    environment = {key: value for key, value in os.environ.items() if key not in amx._SETTINGS}
    done = subprocess.run([sys.executable, "-c", PRODUCT], env=environment, capture_output=True)
    assert done.returncode == 0 or amx._num_palettes() == 0
