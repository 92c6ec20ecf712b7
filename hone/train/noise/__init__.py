"""Trainings whose linears compute with the noise of a simulated device."""
