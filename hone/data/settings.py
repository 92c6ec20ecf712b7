"""Settings: the fields of the data stage, which all steps read."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hone.base.errors import did_you_mean
from hone.base.spec import Spec
from hone.base.stage import Stage
from hone.base.table import Choice, Technique
from hone.data import ANNOTATIONS, DECONTAMINATIONS, DEDUPS, EDITS, FILTERS, IDENTIFIERS, SCORERS
from hone.data.signals import DOCUMENT, SIGNALS
from hone.data.tokens.spec import Tokenizer
from hone.feed.conversations.spec import CONVERSATION
from hone.feed.files.kinds import NAMES
from hone.feed.packing import PackingSpec
from hone.readers import EXTRACTORS

if TYPE_CHECKING:
    from hone.readers.documents import Options


_LATER = ("split", "dropped_by", "reason", "cluster", "cluster_size")
"""Columns that the stage adds to its own tables at the end."""


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


class Settings(Stage):
    """The source and the steps of curation; `Data` in stage.py runs them."""

    source: str | tuple[str, ...] = Field(
        "python",
        min_length=1,
        description="'python' (the library of the running Python: docstrings, sources, texts), a file or folder (formats: "
        "docs/data.md), a pattern of them ('texts/*.txt'), a URL, hf:OWNER/NAME[:CONFIG][:SPLIT], or several of them.",
    )
    format: Literal[("auto", *NAMES)] = Field(  # type: ignore[valid-type]
        "auto",
        description="Format of all files and of the members of zip and tar files; 'auto': by the ending of each, without one by "
        "its content.",
    )
    max_bytes: int | None = Field(None, gt=0, description="Most bytes of text to read, in order of file names.")
    text_field: str = Field("text", description="Field of JSON rows, column of Parquet tables with the text.")
    url_field: str = Field("url", description="Field or column with the URL of a text.")
    metadata_fields: tuple[str, ...] = Field((), description="Other fields or columns to copy, as JSON.")
    encoding: str = Field(
        "utf-8", description="Encoding of text files without a byte order mark; 'auto': detected for each document."
    )
    extractor: Annotated[Technique, Choice(EXTRACTORS)] = Field(
        "fast",  # type: ignore[arg-type]
        validate_default=True,
        description="Extractor of the main text of web pages.",
    )
    max_document_chars: int = Field(
        400_000, ge=1000, description="Longer text files are cut into documents of at most so many characters."
    )
    identifier: Annotated[Technique, Choice(IDENTIFIERS)] = Field(
        "hone",  # type: ignore[arg-type]
        validate_default=True,
        description="Identifier of the language of every text.",
    )
    languages: tuple[str, ...] = Field(
        (),
        description="Languages (ISO 639) that the identifier chooses among; none: all of its languages. To keep only some, add a filter.",
    )
    scorers: tuple[Annotated[Technique, Choice(SCORERS)], ...] = Field(
        (), description="Models that give every document a score, each a column for filters."
    )
    filters: tuple[Annotated[Technique, Choice(FILTERS)], ...] = Field(
        ("length", "gopher_quality", "gopher_repetition"),  # type: ignore[arg-type]
        validate_default=True,
        description="Rule filters in order; each document is dropped by the first rule it fails.",
    )
    dedups: tuple[Annotated[Technique, Choice(DEDUPS)], ...] = Field(
        ("exact", "minhash"),  # type: ignore[arg-type]
        validate_default=True,
        description="Deduplications in order.",
    )
    annotations: tuple[Annotated[Technique, Choice(ANNOTATIONS)], ...] = Field(
        (),
        description="What a language model behind an endpoint says about, or makes of, the documents left, in order.",
    )
    edits: tuple[Annotated[Technique, Choice(EDITS)], ...] = Field(
        (), description="Edits that cut text out of documents, in order, after deduplication."
    )
    decontaminations: tuple[Annotated[Technique, Choice(DECONTAMINATIONS)], ...] = Field(
        (), description="Removal of evaluation sets' examples from the text, after the other steps."
    )
    validation_fraction: float = Field(0.05, ge=0, lt=1, description="Share of documents held out, chosen by hash.")
    tokenizer: Tokenizer = Field(Tokenizer(), description="The tokenizer to train or to reuse.")
    packing: PackingSpec = Field(PackingSpec(), description="How tokens are packed into sequences: stream or best_fit.")
    export: Exports = Field(Exports(), description="Other forms of the result: dropped, jsonl, hugging_face.")
    num_samples: int = Field(3, ge=0, description="Dropped documents to show per reason.")

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, value: str) -> str:
        try:
            codecs.lookup("utf-8" if value == "auto" else value)
        except LookupError:
            raise ValueError(f"'{value}' is not an encoding of Python: write utf-8, latin-1, or auto") from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _conversations_stay_whole(cls, values: Any) -> Any:
        """Without another word conversations are packed as whole documents, no rule for prose judges them, and only equal ones are duplicates."""
        given = values.get("tokenizer") if isinstance(values, dict) else None
        if not (given.get("chat") if isinstance(given, dict) else getattr(given, "chat", None)):
            return values
        packing = values.get("packing", {})
        values = {"filters": (), "dedups": ("exact",), **values}
        return values | {"packing": {"kind": "best_fit"} | packing} if isinstance(packing, dict) else values

    @model_validator(mode="after")
    def _conversations_are_as_read(self) -> Settings:
        """Steps that change texts would leave the conversations, of which the tokens are made, as they are."""
        if self.tokenizer.chat is None:
            return self
        for name in ("edits", "annotations", "decontaminations"):
            for number, one in enumerate(getattr(self, name)):
                if name == "edits" or one.kind == "llm_rephrase" or getattr(one, "remove", "") == "span":
                    raise ValueError(
                        f"{name}.{number} ({one.kind}) changes texts, and the tokens of tokenizer.chat are made of the conversations "
                        "as they were read; use steps that drop whole conversations, such as filters, dedups and remove: document"
                    )
        if CONVERSATION in self.metadata_fields:
            raise ValueError(
                f"metadata_fields: '{CONVERSATION}' is the field in which tokenizer.chat keeps conversations"
            )
        return self

    @model_validator(mode="after")
    def _languages_known(self) -> Settings:
        """A language that the identifier never names would silently drop all text of the intended one."""
        for wanted in (self.languages, *(one.languages for one in self.filters if hasattr(one, "languages"))):
            self.identifier.check(wanted)  # type: ignore[attr-defined]
        return self

    @model_validator(mode="after")
    def _columns_apart(self) -> Settings:
        """A column of a scorer or an annotation must not be another's, nor one that every document has."""
        taken = dict.fromkeys((*DOCUMENT, *SIGNALS, *_LATER), "every document has")
        writers = [(f"scorers.{number}", scorer, "column") for number, scorer in enumerate(self.scorers)]
        writers += [(f"annotations.{number}", one, "fields") for number, one in enumerate(self.annotations)]
        for place, technique, field in writers:
            for column in technique.columns:  # type: ignore[attr-defined]
                if column in taken:
                    raise ValueError(
                        f"{place} ({technique.kind}) would write column '{column}', which {taken[column]}; "
                        f"give it another name with {place}.{field}"
                    )
                taken[column] = f"{place} ({technique.kind}) writes"
        return self

    @model_validator(mode="after")
    def _columns_known(self) -> Settings:
        """The column by which a deduplication chooses must be a signal, a scorer's, or a copied field; filters say what theirs need."""
        known = [*DOCUMENT, *SIGNALS, *(column for scorer in self.scorers for column in scorer.columns)]  # type: ignore[attr-defined]
        for technique in self.filters:
            technique.check(known)  # type: ignore[attr-defined]
        for number, dedup in enumerate(self.dedups):
            column = getattr(dedup, "column", "")
            if column and column not in (*known, *self.metadata_fields):
                raise ValueError(
                    f"dedups.{number}.column = '{column}' is no column of documents: "
                    f"{did_you_mean(column, known)}a field of the input must be in metadata_fields"
                )
        return self

    @property
    def forced(self) -> str:
        """The format of all files, '' for that of their names and contents."""
        return "" if self.format == "auto" else self.format

    @property
    def options(self) -> Options:
        """The options of the readers."""
        from hone.readers.documents import Options

        return Options(
            text_field=self.text_field,
            encoding=self.encoding,
            max_document_chars=self.max_document_chars,
            extractor=self.extractor,
            url_field=self.url_field,
            metadata_fields=self.metadata_fields,
            chat="" if self.tokenizer.chat is None else self.tokenizer.chat.kind,
        )
