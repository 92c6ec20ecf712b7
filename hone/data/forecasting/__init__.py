"""Forecasting: what the data stage will take and give, from a sample that goes through every step first."""
