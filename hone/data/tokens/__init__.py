"""Text to token ids, ids to rows: encoding, packing and the index of rows."""
