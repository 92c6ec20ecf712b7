"""What a decontamination is: it says which documents hold evaluation examples, and which examples are held by which."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hone.base.table import Technique
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts


class Found(NamedTuple):
    """Both sides of a contamination.

    `dropped` bool [num_documents]: documents that go whole. `cuts`: what goes of the others, per shard. `figures`: counts, also
    per evaluation set. `examples`: a row for every evaluation example that was hit, most documents first, with samples of them.
    `warnings`: what a reader must know, such as a set of which nothing could be looked for.
    """

    dropped: np.ndarray
    cuts: list[Cuts]
    figures: dict[str, Any]
    examples: list[dict[str, Any]]
    warnings: list[str]


class Decontamination(Technique):
    """Finds documents that hold what a model will be tested on."""

    reason: ClassVar[str] = "contaminated"

    def contaminated(self, corpus: Corpus, alive: np.ndarray, state: Path) -> Found:
        """Looks through the documents where `alive` (bool [num_documents]); `state` keeps what a killed run need not redo.

        Raises SpecError when an evaluation set cannot be read.
        """
        raise NotImplementedError
