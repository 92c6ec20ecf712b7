"""Learning-rate schedules: what they share, and a file for each."""
