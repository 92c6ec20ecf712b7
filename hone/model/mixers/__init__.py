"""Mixers: how the tokens of a sequence see each other. One file a technique."""

from hone.base.table import Table

MIXERS = Table(
    "mixer",
    {
        "attention": "hone.model.mixers.attention:Attention",
        "sliding_window": "hone.model.mixers.sliding_window:SlidingWindow",
    },
)
