"""The base of edits, which find byte spans to cut out of documents because the corpus contains them elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts


class Edit(Technique):
    """Cuts repeated spans out of documents. Which copy is kept depends on document ids alone, never on the order of reading."""

    reason: ClassVar[str] = "nothing_left"

    def cuts(self, corpus: Corpus, kept: np.ndarray, state: Path) -> list[Cuts]:
        """The cuts of each shard, as byte offsets in the texts that `corpus` returns now (`join` appends them to earlier ones).

        Only documents where `kept` (bool [num_documents]) are compared. A document to drop is cut as a whole. Files in the
        folder `state` are reused by a resumed run.
        """
        raise NotImplementedError
