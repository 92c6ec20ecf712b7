"""In which order the rows of packed text are learned, one curriculum a file."""
