"""From raw text to packed training tokens: read, annotate as columns, decide by expressions, deduplicate, tokenize, pack."""

from hone.base.table import Table

IDENTIFIERS = Table(
    "identifier",
    {
        "hone": "hone.data.identifiers:Own",
        "cld2": "hone.data.identifiers:CLD2",
        "fasttext": "hone.data.identifiers:FastText",
    },
)

FILTERS = Table(
    "filter",
    {
        "length": "hone.data.filters.documents:Length",
        "language": "hone.data.filters.documents:Language",
        "gopher_quality": "hone.data.filters.gopher:GopherQuality",
        "gopher_repetition": "hone.data.filters.gopher:GopherRepetition",
        "c4": "hone.data.filters.web:C4",
        "fineweb": "hone.data.filters.web:FineWeb",
        "refinedweb": "hone.data.filters.web:RefinedWeb",
        "pii": "hone.data.filters.documents:PII",
        "toxicity": "hone.data.filters.documents:Toxicity",
        "url": "hone.data.filters.web:URL",
        "expression": "hone.data.filters.documents:Custom",
    },
)

SCORERS = Table(
    "scorer",
    {
        "hashed_logistic": "hone.data.quality.hashed_logistic:HashedLogistic",
        "neural": "hone.data.quality.neural:Neural",
        "cascade": "hone.data.quality.cascade:Cascade",
        "function": "hone.data.quality.function:Function",
        "lexicon": "hone.data.quality.lexicon:Lexicon",
    },
)

DEDUPS = Table(
    "dedup",
    {
        "exact": "hone.data.dedup.exact:Exact",
        "minhash": "hone.data.dedup.minhash:MinHash",
        "simhash": "hone.data.dedup.simhash:SimHash",
        "semantic": "hone.data.dedup.semantic:Semantic",
    },
)

ANNOTATIONS = Table(
    "annotation",
    {
        "llm_columns": "hone.data.llm.techniques:LLMColumns",
        "llm_rephrase": "hone.data.llm.techniques:LLMRephrase",
    },
)

EDITS = Table(
    "edit",
    {
        "c4_lines": "hone.data.edits.page_lines:C4Lines",
        "refinedweb_lines": "hone.data.edits.page_lines:RefinedWebLines",
        "mask": "hone.data.edits.mask:Mask",
        "lines": "hone.data.edits.lines:Lines",
        "substrings": "hone.data.edits.substrings:Substrings",
    },
)

DECONTAMINATIONS = Table(
    "decontamination",
    {
        "items": "hone.data.contamination.items:Items",
        "ngrams": "hone.data.contamination.ngrams:NGrams",
    },
)

EXECUTORS = Table(
    "executor",
    {
        "serial": "hone.data.executors.serial:Serial",
        "processes": "hone.data.executors.processes:Processes",
        "ray": "hone.data.executors.ray:Ray",
        "slurm": "hone.data.executors.slurm:Slurm",
    },
)
