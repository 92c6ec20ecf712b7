"""Root-mean-square norm, with a residual sum and quantized output on request: `rms_norm`."""
