"""Reads artifacts and writes one page about them; stages never import it."""

from hone.report.write import build, picture

__all__ = ["build", "picture"]
