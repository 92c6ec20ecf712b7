"""Training on one device or many: schedules, objectives, optimizers, activation checkpointing, precision, and the loop over steps."""

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
        "dpo": "hone.train.objectives.preference.dpo:DPO",
        "orpo": "hone.train.objectives.preference.orpo:ORPO",
        "kto": "hone.train.objectives.preference.kto:KTO",
        "simpo": "hone.train.objectives.preference.simpo:SimPO",
        "reward": "hone.train.objectives.preference.reward:Reward",
        "grpo": "hone.train.objectives.written_answers.grpo:GRPO",
        "best_of_n": "hone.train.objectives.written_answers.best_of_n:BestOfN",
        "r_drop": "hone.train.objectives.r_drop:RDrop",
        "hidden_states": "hone.train.objectives.hidden_states:HiddenStates",
        "relations": "hone.train.objectives.relations:Relations",
        "minilm": "hone.train.objectives.minilm:MiniLM",
        "attention_maps": "hone.train.objectives.attention_maps:AttentionMaps",
        "medusa": "hone.train.objectives.draft_heads.medusa:Medusa",
        "eagle3": "hone.train.objectives.draft_heads.eagle3:Eagle3",
    },
)

OPTIMIZERS = Table(
    "optimizer",
    {
        "adamw": "hone.train.optimizers.adamw:AdamW",
        "adamw_8bit": "hone.train.optimizers.adamw_8bit:AdamW8bit",
        "adafactor": "hone.train.optimizers.adafactor:Adafactor",
        "lion": "hone.train.optimizers.lion:Lion",
        "muon": "hone.train.optimizers.muon:Muon",
        "soap": "hone.train.optimizers.soap:SOAP",
    },
)

ACTIVATION_CHECKPOINTINGS = Table(
    "activation_checkpointing",
    {
        "none": "hone.train.activation_checkpointing.uniform:KeepAll",
        "full": "hone.train.activation_checkpointing.uniform:Full",
        "every_nth": "hone.train.activation_checkpointing.uniform:EveryNth",
        "layers": "hone.train.activation_checkpointing.uniform:Listed",
        "sqrt": "hone.train.activation_checkpointing.uniform:SquareRoot",
        "selective": "hone.train.activation_checkpointing.selective:Selective",
        "optimal": "hone.train.activation_checkpointing.optimal:Optimal",
        "memory_budget": "hone.train.activation_checkpointing.budget:MemoryBudget",
        "offload": "hone.train.activation_checkpointing.offload:Offload",
    },
)

FP8_PRECISIONS = Table(
    "fp8 precision",
    {
        "fp8": "hone.train.fp8.techniques:Rowwise",
        "fp8_tensorwise": "hone.train.fp8.techniques:Tensorwise",
        "fp8_rowwise_with_gw_hp": "hone.train.fp8.techniques:RowwiseWithGwHp",
        "fp8_blockwise": "hone.train.fp8.techniques:Blockwise",
    },
)

OFFLOADS = Table(
    "offload",
    {
        "none": "hone.train.offload.techniques:Resident",
        "host": "hone.train.offload.techniques:Host",
        "nvme": "hone.train.offload.techniques:Nvme",
        "auto": "hone.train.offload.techniques:Auto",
    },
)

DATA_PARALLEL = Table(
    "data parallelism",
    {
        "ddp": "hone.train.data_parallel.ddp:DDP",
        "zero1": "hone.train.data_parallel.zero:Zero1",
        "zero2": "hone.train.data_parallel.zero:Zero2",
        "zero3": "hone.train.data_parallel.zero:Zero3",
        "bf16_gradients": "hone.train.data_parallel.compressed:Bf16Gradients",
        "zero_plus_plus": "hone.train.data_parallel.zero_plus_plus:ZeroPlusPlus",
        "powersgd": "hone.train.data_parallel.compressed:PowerSGD",
        "local_sgd": "hone.train.data_parallel.local_sgd:LocalSGD",
        "diloco": "hone.train.data_parallel.local_sgd:DiLoCo",
        "bsp": "hone.train.data_parallel.asynchronous.techniques:BSP",
        "ssp": "hone.train.data_parallel.asynchronous.techniques:SSP",
        "asp": "hone.train.data_parallel.asynchronous.techniques:ASP",
        "gossip": "hone.train.data_parallel.asynchronous.techniques:Gossip",
        "ad_psgd": "hone.train.data_parallel.asynchronous.techniques:ADPSGD",
    },
)

CONTEXT_PARALLEL = Table(
    "context parallelism",
    {
        "ring": "hone.train.context_parallel.techniques:Ring",
        "all_gather": "hone.train.context_parallel.techniques:AllGather",
        "ulysses": "hone.train.context_parallel.techniques:Ulysses",
    },
)

PIPELINE_SCHEDULES = Table(
    "pipeline schedule",
    {
        "naive": "hone.train.pipeline.techniques:Naive",
        "gpipe": "hone.train.pipeline.techniques:GPipe",
        "1f1b": "hone.train.pipeline.techniques:OneForwardOneBackward",
        "interleaved": "hone.train.pipeline.techniques:Interleaved",
        "breadth_first": "hone.train.pipeline.techniques:BreadthFirst",
        "zb_h1": "hone.train.pipeline.techniques:ZbH1",
        "zb_h2": "hone.train.pipeline.techniques:ZbH2",
        "zb_v": "hone.train.pipeline.techniques:ZbV",
        "dualpipe": "hone.train.pipeline.techniques:DualPipe",
        "dualpipe_v": "hone.train.pipeline.techniques:DualPipeV",
        "pipedream": "hone.train.pipeline.techniques:PipeDream",
        "pipedream_vertical": "hone.train.pipeline.techniques:PipeDreamVertical",
        "pipedream_2bw": "hone.train.pipeline.techniques:PipeDream2BW",
    },
)
