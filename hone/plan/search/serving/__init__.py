"""The serving part of a search: formats and engine sizes, and their latency, rate and bytes."""
