"""The settings of exports."""

from __future__ import annotations

from pydantic import Field

from hone.base.spec import Spec


class Exports(Spec):
    """What is written beside the usual output."""

    dropped: bool = Field(
        False,
        description="dropped/*.jsonl.zst: every dropped document as it was read, with the step, the reason, the rule and its values.",
    )
    jsonl: bool = Field(False, description="jsonl/*.jsonl.zst: the kept documents with all columns.")
    hugging_face: bool = Field(
        False, description="hugging_face/: the kept documents as a folder for datasets.load_dataset, with a card."
    )
