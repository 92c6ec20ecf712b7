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
