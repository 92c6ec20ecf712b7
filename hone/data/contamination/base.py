"""The base of decontaminations, which find the documents that contain evaluation examples, and the examples found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hone.base.table import Technique
from hone.data.edits.cuts import Cuts

if TYPE_CHECKING:
    from hone.data.corpus import Corpus


class Found(NamedTuple):
    """The documents and the examples of a contamination.

    `dropped` bool [num_documents]: documents to drop. `cuts`: spans to cut out of the others, per shard. `figures`: counts, also
    per evaluation set. `examples`: a row for every evaluation example found, by number of documents, with samples of them.
    `warnings`: for instance evaluation sets whose texts are all too short to search for.
    """

    dropped: np.ndarray
    cuts: list[Cuts]
    figures: dict[str, Any]
    examples: list[dict[str, Any]]
    warnings: list[str]


class Decontamination(Technique):
    """Finds documents that contain text of evaluation sets."""

    reason: ClassVar[str] = "contaminated"

    def contaminated(self, corpus: Corpus, kept: np.ndarray, state: Path) -> Found:
        """Searches the documents where `kept` (bool [num_documents]); files in `state` are reused by a resumed run.

        Raises SpecError when an evaluation set cannot be read.
        """
        raise NotImplementedError
