"""Serving under a predicted clock: the engine's own scheduler and pages run, and a step takes the seconds that it should cost."""
