"""Tests of conversations: forms of rows, stock chat templates, spans."""
