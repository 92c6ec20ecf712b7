"""Zero expansion: width by new entries with random incoming weights, which nothing reads yet."""

from __future__ import annotations

from typing import ClassVar

from hone.model.growth.width import Width


class ZeroExpansion(Width):
    """Widens by random entries with outgoing weights of zero: the same logits. Gesmundo and Maile 2023, arXiv:2308.06103.

    A new head or feed-forward channel has random rows and zero columns; a new hidden channel is zero in embedding and residual stream,
    and has random columns in what reads it. No two entries are alike, so nothing has to part them.
    """

    paper: ClassVar[str] = "arXiv:2308.06103"
    copies: ClassVar[bool] = False

    @property
    def exact(self) -> bool:
        return True
