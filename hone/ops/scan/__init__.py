"""Linear attention with decays as a scan over chunks: `scan`, `scan_delta`."""
