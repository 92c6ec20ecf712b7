"""A teacher's log-probabilities on disk: written once for a data set, read by every distillation on it."""
