"""How full the pages of running sequences are: the slots that hold no token, looked at every few steps."""

from __future__ import annotations

from collections.abc import Sequence

from hone.serve.paging.pages import PagePool
from hone.serve.sequence import Seq

SAMPLED_STEPS = 8
"""Every so many steps the pages are looked at: a look takes a moment for each running sequence."""


class PageFill:
    """Sums over the looks. A slot is the room of one token in a used page; a page that several sequences share counts once.

    A slot is empty behind the last token of a sequence: the waste of pages (Kwon et al. 2023, arXiv:2309.06180, figure 2). A slot is
    `coming` whose token is known and not computed yet: a prompt gets all its pages when it starts, however many steps it takes.
    Shared pages are full, so that neither is lost twice.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.empty_slots = 0
        self.coming_slots = 0
        self.used_pages = 0
        self.looks = 0
        self._steps = 0

    def step(self, pool: PagePool, running: Sequence[Seq]) -> None:
        """To be called before each step."""
        if self._steps % SAMPLED_STEPS == 0:
            self._look(pool, running)
        self._steps += 1

    def _look(self, pool: PagePool, running: Sequence[Seq]) -> None:
        used, size = pool.num_used, pool.block_size
        self.looks += 1
        self.used_pages += used
        self.slots += used * size
        for seq in running:
            room = len(seq.pages) * size + seq.num_dropped
            known = min(room, seq.length)
            self.empty_slots += room - known
            self.coming_slots += known - seq.num_computed

    def stats(self) -> dict[str, float]:
        """The sums by the names that the engine reports."""
        return {"kv_slots": self.slots, "kv_slots_empty": self.empty_slots, "kv_slots_coming": self.coming_slots}
