"""Root-mean-square norm, with optional residual sum and quantized output: `rms_norm`."""
