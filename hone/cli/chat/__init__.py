"""`hone chat`: a conversation in the terminal with a model folder, or with the model of a running server."""
