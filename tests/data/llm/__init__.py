"""Tests of language models behind an endpoint."""
