"""Objectives: the loss that a training minimizes. One file per objective."""
