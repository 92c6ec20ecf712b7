"""Conversations for training: the forms of their rows, the token ids that a chat template gives them, and which of these are trained on."""
