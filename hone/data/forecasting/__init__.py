"""Forecasting: estimates of the data stage, from a sample of the input that goes through every step."""
