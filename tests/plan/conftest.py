"""Fixtures of the compression tests, for plans of compressions."""

from __future__ import annotations

from tests.compress.conftest import calibration_text as calibration_text
from tests.compress.conftest import compress as compress
