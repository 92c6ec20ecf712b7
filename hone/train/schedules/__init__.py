"""Learning-rate schedules. One file per schedule."""
