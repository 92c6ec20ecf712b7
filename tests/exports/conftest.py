"""Exports start from the small models of the compression tests."""

from tests.compress.conftest import calibration_text, compress, family_folder, stories  # noqa: F401 (fixtures)
