"""Data-parallel replicas of an engine: which of them takes a request."""
