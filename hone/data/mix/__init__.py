"""How much of each source a model is trained on, one method a file."""
