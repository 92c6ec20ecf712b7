"""What training and evaluation read: packed tokens on disk, mixtures of them, their order, and texts as they are."""

from hone.base.table import Table

MIXTURES = Table(
    "mixture",
    {
        "proportional": "hone.feed.mix.proportional:Proportional",
        "temperature": "hone.feed.mix.temperature:Temperature",
        "unimax": "hone.feed.mix.unimax:UniMax",
        "utilimax": "hone.feed.mix.utilimax:UtiliMax",
        "regmix": "hone.feed.mix.regmix:RegMix",
        "medu": "hone.feed.mix.medu:Medu",
        "fixed": "hone.feed.mix.fixed:Fixed",
    },
)

CURRICULA = Table(
    "curriculum",
    {
        "random": "hone.feed.order.random:Random",
        "staged": "hone.feed.order.staged:Staged",
        "competence": "hone.feed.order.competence:Competence",
        "warmup_then_random": "hone.feed.order.warmup_then_random:WarmupThenRandom",
        "multi_task": "hone.feed.order.multi_task:MultiTask",
    },
)

ROWS: dict[str, str] = {
    "jsonl": "hone.feed.rows:lines",
    "json": "hone.feed.rows:values",
    "parquet": "hone.feed.rows:table",
}
"""Files whose rows are texts or conversations, by their format in `hone.feed.files.kinds` or, of a format that stands not there, by
the ending of their names ('.chats'), and the function that reads them: `rows(stream, problems)` yields a dict a row, with `text`
or `messages`, from the decompressed bytes; `problems` counts the reasons for which rows are left out."""
