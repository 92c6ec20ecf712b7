"""From raw text to packed training tokens: read, annotate as columns, decide by expressions, deduplicate, tokenize, pack."""

from hone.base.table import Table

EXTRACTORS = Table(
    "extractor",
    {
        "fast": "hone.data.readers.fast:Fast",
        "careful": "hone.data.readers.careful:Careful",
    },
)

IDENTIFIERS = Table(
    "identifier",
    {
        "hone": "hone.data.identifiers.own:Own",
        "cld2": "hone.data.identifiers.cld2:CLD2",
        "fasttext": "hone.data.identifiers.fasttext:FastText",
    },
)

FILTERS = Table(
    "filter",
    {
        "length": "hone.data.filters.length:Length",
        "language": "hone.data.filters.language:Language",
        "gopher_quality": "hone.data.filters.gopher_quality:GopherQuality",
        "gopher_repetition": "hone.data.filters.gopher_repetition:GopherRepetition",
        "c4": "hone.data.filters.c4:C4",
        "fineweb": "hone.data.filters.fineweb:FineWeb",
        "refinedweb": "hone.data.filters.refinedweb:RefinedWeb",
        "pii": "hone.data.filters.pii:PII",
        "toxicity": "hone.data.filters.toxicity:Toxicity",
        "url": "hone.data.filters.url:URL",
        "expression": "hone.data.filters.expression:Custom",
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
        "llm_columns": "hone.data.llm.columns:LLMColumns",
        "llm_rephrase": "hone.data.llm.rephrase:LLMRephrase",
    },
)

EDITS = Table(
    "edit",
    {
        "c4_lines": "hone.data.edits.c4_lines:C4Lines",
        "refinedweb_lines": "hone.data.edits.refinedweb_lines:RefinedWebLines",
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
