"""Reads artifacts and draws one page about them; no stage ever calls it."""

from hone.report.write import build, picture

__all__ = ["build", "picture"]
