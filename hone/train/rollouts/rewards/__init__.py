"""Rewards: what an answer to a prompt is worth, computed from its text. One file per reward."""
