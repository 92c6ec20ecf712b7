"""Steps that calibrate scales of a model's KV cache."""
