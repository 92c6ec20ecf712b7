"""The text of the data."""

from __future__ import annotations

from hone.train.texts.base import Text


class Given(Text):
    """The data as they are."""
