"""Spikes of the loss: what is done about a step that would do harm."""
