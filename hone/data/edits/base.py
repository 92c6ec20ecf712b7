"""The base of edits, which find byte spans to cut out of documents, or to write something else for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts, figures


class Edit(Technique):
    """Cuts spans out of documents. What is cut depends on texts and document ids alone, never on the order of reading."""

    reason: ClassVar[str] = "nothing_left"
    discloses: ClassVar[bool] = True
    """Whether samples may show what was cut."""

    def cuts(self, corpus: Corpus, kept: np.ndarray, state: Path) -> list[Cuts]:
        """The cuts of each shard, as byte offsets in the texts that `corpus` returns now (`join` appends them to earlier ones).

        Only documents where `kept` (bool [num_documents]) are compared. A document to drop is cut as a whole. Files in the
        folder `state` are reused by a resumed run.
        """
        raise NotImplementedError

    def figures(self, corpus: Corpus, cuts: Sequence[Cuts], state: Path) -> dict[str, Any]:
        """Counts for stats.json, after `cuts` with the same `state`."""
        return figures(cuts)
