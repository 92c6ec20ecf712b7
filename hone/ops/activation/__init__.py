"""The gates of feed-forwards: `swiglu`."""
