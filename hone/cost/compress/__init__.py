"""What compression costs: seconds and memory of the steps of every matrix, and of the passes that calibrate them."""
