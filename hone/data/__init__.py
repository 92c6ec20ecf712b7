"""From raw text to packed training tokens: read, annotate as columns, decide by expressions, deduplicate, tokenize, pack."""

from hone.base.table import Table

EXTRACTORS = Table(
    "extractor",
    {
        "fast": "hone.data.readers.fast:Fast",
        "careful": "hone.data.readers.careful:Careful",
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
    },
)

EDITS = Table(
    "edit",
    {
        "lines": "hone.data.edits.lines:Lines",
        "substrings": "hone.data.edits.substrings:Substrings",
    },
)

DECONTAMINATIONS = Table("decontamination", {"ngrams": "hone.data.contamination.ngrams:NGrams"})

EXECUTORS = Table(
    "executor",
    {
        "serial": "hone.data.executors.serial:Serial",
        "processes": "hone.data.executors.processes:Processes",
        "ray": "hone.data.executors.ray:Ray",
    },
)

MIXTURES = Table(
    "mixture",
    {
        "proportional": "hone.data.mix.proportional:Proportional",
        "temperature": "hone.data.mix.temperature:Temperature",
        "unimax": "hone.data.mix.unimax:UniMax",
        "utilimax": "hone.data.mix.utilimax:UtiliMax",
        "regmix": "hone.data.mix.regmix:RegMix",
        "medu": "hone.data.mix.medu:Medu",
        "fixed": "hone.data.mix.fixed:Fixed",
    },
)

CURRICULA = Table(
    "curriculum",
    {
        "random": "hone.data.order.random:Random",
        "staged": "hone.data.order.staged:Staged",
        "competence": "hone.data.order.competence:Competence",
        "warmup_then_random": "hone.data.order.warmup_then_random:WarmupThenRandom",
        "multi_task": "hone.data.order.multi_task:MultiTask",
    },
)
