"""What a training costs: seconds of a step and its transfers, bytes of memory and disk, of any layout of ranks."""
