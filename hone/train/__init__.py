"""Training on one device: schedules, objectives, rematerialization, precision, and the loop that joins them."""

from hone.base.table import Table

SCHEDULES = Table(
    "schedule",
    {
        "cosine": "hone.train.cosine:Cosine",
        "wsd": "hone.train.wsd:WarmupStableDecay",
    },
)

OBJECTIVES = Table(
    "objective",
    {
        "next_token": "hone.train.next_token:NextToken",
        "distill": "hone.train.distill:Distill",
    },
)

REMATS = Table(
    "remat",
    {
        "none": "hone.train.remat:KeepAll",
        "every_nth": "hone.train.remat:EveryNth",
        "sqrt": "hone.train.remat:SquareRoot",
    },
)
