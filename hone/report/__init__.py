"""Reads artifacts and draws one page about them; no stage ever calls it."""
