"""What a training is, in numbers that its estimates are computed from."""
