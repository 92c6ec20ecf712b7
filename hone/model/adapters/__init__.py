"""Adapters: small weights added to a model's linears, whose own weights stay as they are. One file a technique."""

from hone.base.table import Table

ADAPTERS = Table("adapter", {})
