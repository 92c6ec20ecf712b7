"""Objectives: what a training minimises; what they share, and a file for each."""
