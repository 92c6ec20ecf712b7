"""Tests of hone.plan."""
