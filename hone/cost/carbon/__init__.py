"""Grams of CO2e: carbon intensities of grids over time, and the footprint of a run, from its energy and its hardware."""
