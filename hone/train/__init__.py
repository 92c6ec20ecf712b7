"""Training on one device: schedules, objectives, optimizers, activation checkpointing, precision, and the loop over steps."""

from hone.base.table import Table

SCHEDULES = Table(
    "schedule",
    {
        "cosine": "hone.train.schedules.cosine:Cosine",
        "wsd": "hone.train.schedules.wsd:WarmupStableDecay",
    },
)

OBJECTIVES = Table(
    "objective",
    {
        "next_token": "hone.train.objectives.next_token:NextToken",
        "distill": "hone.train.objectives.distill:Distill",
    },
)

OPTIMIZERS = Table(
    "optimizer",
    {
        "adamw": "hone.train.optimizers.adamw:AdamW",
        "adamw_8bit": "hone.train.optimizers.adamw_8bit:AdamW8bit",
        "muon": "hone.train.optimizers.muon:Muon",
    },
)

ACTIVATION_CHECKPOINTINGS = Table(
    "activation_checkpointing",
    {
        "none": "hone.train.activation_checkpointing:KeepAll",
        "every_nth": "hone.train.activation_checkpointing:EveryNth",
        "sqrt": "hone.train.activation_checkpointing:SquareRoot",
    },
)
