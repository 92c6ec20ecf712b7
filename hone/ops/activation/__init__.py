"""The gates of feed-forwards: `swiglu`, `geglu`, `clamped_swiglu`."""
