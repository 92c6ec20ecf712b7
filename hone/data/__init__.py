"""From raw text to packed training tokens: read, annotate as columns, decide by expressions, deduplicate, tokenize, pack."""

from hone.base.table import Table

FILTERS = Table(
    "filter",
    {
        "length": "hone.data.filters.length:Length",
        "language": "hone.data.filters.language:Language",
        "gopher_quality": "hone.data.filters.gopher_quality:GopherQuality",
        "gopher_repetition": "hone.data.filters.gopher_repetition:GopherRepetition",
        "c4": "hone.data.filters.c4:C4",
        "fineweb": "hone.data.filters.fineweb:FineWeb",
        "expression": "hone.data.filters.expression:Custom",
    },
)

DEDUPS = Table(
    "dedup",
    {
        "exact": "hone.data.dedup.exact:Exact",
        "minhash": "hone.data.dedup.minhash:MinHash",
    },
)
