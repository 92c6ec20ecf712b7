"""Adapters: what is added to a model's linears, which keep their own weights. One file a technique."""

from hone.base.table import Table

ADAPTERS = Table("adapter", {})
