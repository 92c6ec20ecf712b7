"""KV policies: which of a sequence's own keys and values stay in its pages."""
