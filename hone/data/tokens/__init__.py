"""From text to token ids to sequences: encoding, packing and its index."""
