"""Faults of the hardware: what notices that bytes or results are not what they should be."""
