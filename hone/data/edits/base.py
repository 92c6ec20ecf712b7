"""What an edit is: it names byte spans to cut out of documents because the corpus holds them elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts


class Edit(Technique):
    """Cuts repeated parts out of documents. Which copy stays depends on document ids alone, never on the order of reading."""

    reason: ClassVar[str] = "nothing_left"

    def cuts(self, corpus: Corpus, alive: np.ndarray, state: Path) -> list[Cuts]:
        """The cuts of each shard, in bytes of the texts as `corpus` gives them now (`join` puts them after earlier ones).

        Only documents where `alive` (bool [num_documents]) take part. A document that shall go is cut whole. `state` is a
        folder for what a killed run need not do again.
        """
        raise NotImplementedError
