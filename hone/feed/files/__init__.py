"""The files of a source: listed, opened and decompressed, here or in a store; their formats by name."""
