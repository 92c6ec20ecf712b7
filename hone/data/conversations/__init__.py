"""Conversations of the data stage: their token ids, which of these are trained on, and the ones left out."""
