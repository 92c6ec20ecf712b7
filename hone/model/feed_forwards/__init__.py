"""Feed-forwards: what each token does alone. One file a technique."""

from hone.base.table import Table

FEED_FORWARDS = Table("feed-forward", {"swiglu": "hone.model.feed_forwards.swiglu:SwiGLU"})
