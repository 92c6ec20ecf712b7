"""Adapters: small weights added to a model, whose own weights stay as they are. One file a technique."""

from hone.base.table import Table

ADAPTERS = Table(
    "adapter",
    {
        "lora": "hone.model.adapters.lora:LoRA",
        "dora": "hone.model.adapters.dora:DoRA",
        "pissa": "hone.model.adapters.pissa:PiSSA",
        "ia3": "hone.model.adapters.ia3:IA3",
        "houlsby": "hone.model.adapters.bottlenecks.houlsby:Houlsby",
        "pfeiffer": "hone.model.adapters.bottlenecks.pfeiffer:Pfeiffer",
        "parallel": "hone.model.adapters.bottlenecks.parallel:Parallel",
        "prefix": "hone.model.adapters.prompts.prefix:Prefix",
        "prompt_tuning": "hone.model.adapters.prompts.prompt_tuning:PromptTuning",
        "p_tuning": "hone.model.adapters.prompts.p_tuning:PTuning",
        "p_tuning_v2": "hone.model.adapters.prompts.prefix:PTuningV2",
    },
    # Its first values are what a quantizer loses, so that codes and adapter are made together.
    elsewhere={
        "loftq": "make codes and adapter together with hone compress MODEL --steps='[{kind: nf4, double_quant: true}, "
        "{kind: loftq, rank: 16}]' --out=FOLDER (PEFT's loftq_iter is iterations), then train on with the adapter: "
        "--from.model=FOLDER, without --adapter"
    },
)
"""A spec that declares the weights it adds, around linears, behind blocks or as a prompt before the tokens."""
