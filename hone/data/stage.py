"""The data stage: raw text in, packed tokens with a tokenizer, kept documents and statistics out."""

from __future__ import annotations

from typing import ClassVar

from hone.base.artifact import Artifact, Draft
from hone.base.run import Run
from hone.data.settings import Settings


class Data(Settings):
    """Curates text: read, extract, annotate, filter, deduplicate, split, tokenize, pack."""

    stage: ClassVar[str] = "data"
    roles: ClassVar[dict[str, bool]] = {}

    def execute(self, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Makes the artifact's files in `draft.folder`; every step resumes from `draft.state`."""
        from hone.data.curate import curate

        curate(self, draft, run)
