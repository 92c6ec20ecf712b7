"""Readers: documents from files, archives and pages of any format; what cannot be read is reported with its reason."""

from hone.base.table import Table

EXTRACTORS = Table(
    "extractor",
    {
        "fast": "hone.readers.pages:Fast",
        "careful": "hone.readers.pages:Careful",
    },
)
