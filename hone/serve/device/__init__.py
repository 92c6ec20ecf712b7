"""What brings a step to a device and runs it there: arrays in one copy, passes as CUDA graphs."""
