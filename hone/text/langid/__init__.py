"""hone's own language identification: hashed character n-grams, a table of 75 languages, and its training."""
