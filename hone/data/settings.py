"""Settings: the fields of the data stage, what every step is told."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hone.base.stage import Stage
from hone.base.table import Choice, Technique
from hone.data import DEDUPS, FILTERS
from hone.data.tokens.rows import Rows
from hone.data.tokens.tokenizer import Tokenizer


class Settings(Stage):
    """What to curate and how; `Data` in stage.py does it."""

    source: str = Field(
        "python",
        min_length=1,
        description="'python' (the library of the running Python: docstrings, sources, texts) or a file or folder of "
        ".txt .md .rst .html .py .jsonl .warc .wet (each also .gz, .zst) or .parquet.",
    )
    max_bytes: int | None = Field(None, gt=0, description="Most bytes of text to read, in order of file names.")
    text_field: str = Field("text", description="Field of JSON rows, column of Parquet tables that holds the text.")
    encoding: str = Field("utf-8", description="Encoding of text files without a byte order mark.")
    max_document_chars: int = Field(
        400_000, ge=1000, description="Longer text files are cut into documents of at most so many characters."
    )
    languages: tuple[str, ...] = Field(
        (),
        description="Languages (ISO 639) the identifier chooses among; none: all it knows. Keeping only some is a filter.",
    )
    filters: tuple[Annotated[Technique, Choice(FILTERS)], ...] = Field(
        ("length", "gopher_quality", "gopher_repetition"),  # type: ignore[arg-type]
        validate_default=True,
        description="Rule filters in order; each document is dropped by the first rule it fails.",
    )
    dedups: tuple[Annotated[Technique, Choice(DEDUPS)], ...] = Field(
        ("exact", "minhash"),  # type: ignore[arg-type]
        validate_default=True,
        description="Duplicate removals in order.",
    )
    validation_fraction: float = Field(0.05, ge=0, lt=1, description="Share of documents held out, chosen by hash.")
    tokenizer: Tokenizer = Field(Tokenizer(), description="The tokenizer to train or to take.")
    packing: Rows = Field(Rows(), description="How tokens become rows: stream or best_fit.")
    num_samples: int = Field(3, ge=0, description="Dropped documents to show per reason.")
