"""The engine of a compression: what it is given, and how a run goes from a checkpoint to a finished folder."""
