"""Language identification of our own: hashed character n-grams, their table of 75 languages, and its training."""
