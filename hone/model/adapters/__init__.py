"""Adapters: small weights added to a model's linears, whose own weights stay as they are. One file a technique."""

from hone.base.table import Table

ADAPTERS = Table(
    "adapter",
    {
        "lora": "hone.model.adapters.lora:LoRA",
        "dora": "hone.model.adapters.dora:DoRA",
        "pissa": "hone.model.adapters.pissa:PiSSA",
        "ia3": "hone.model.adapters.ia3:IA3",
    },
)
"""A spec that wraps the linears chosen by `target_modules` and declares the weights it adds."""
