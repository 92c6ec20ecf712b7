"""A model with an adapter as a model folder without one: the adapter's change is added to the weights."""
