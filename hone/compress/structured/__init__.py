"""Structured pruning: smaller layers and fewer of them, in an ordinary dense checkpoint. One file per technique."""
