"""Formats: a reader for each kind of file, with its limits against input that was made to exhaust memory."""
