"""Mixers: how the tokens of a sequence attend to each other. One file per technique."""

from hone.base.table import Table

MIXERS = Table(
    "mixer",
    {
        "attention": "hone.model.mixers.attention:Attention",
        "sliding_window": "hone.model.mixers.sliding_window:SlidingWindow",
        "mla": "hone.model.mixers.mla:MLA",
        "shared_kv": "hone.model.mixers.shared_kv:SharedKV",
        "linformer": "hone.model.mixers.linformer:Linformer",
        "longformer": "hone.model.mixers.longformer:Longformer",
        "bigbird": "hone.model.mixers.bigbird:BigBird",
        "longnet": "hone.model.mixers.longnet:LongNet",
        "reformer": "hone.model.mixers.reformer:Reformer",
        "transformer_xl": "hone.model.mixers.transformer_xl:TransformerXL",
        "compressive": "hone.model.mixers.compressive:Compressive",
        "linear_attention": "hone.model.mixers.linear_attention:LinearAttention",
        "performer": "hone.model.mixers.performer:Performer",
        "retnet": "hone.model.mixers.retnet:RetNet",
        "gated_linear": "hone.model.mixers.gated_linear:GatedLinear",
        "delta_net": "hone.model.mixers.delta_net:DeltaNet",
    },
)
