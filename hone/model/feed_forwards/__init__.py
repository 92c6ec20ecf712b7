"""Feed-forwards, computed for each token alone. One file per technique."""

from hone.base.table import Table

FEED_FORWARDS = Table(
    "feed-forward",
    {
        "swiglu": "hone.model.feed_forwards.swiglu:SwiGLU",
        "geglu": "hone.model.feed_forwards.geglu:GeGLU",
        "moe": "hone.model.feed_forwards.moe:MoE",
    },
)
