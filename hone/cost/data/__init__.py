"""What data work costs: from a sample to the whole."""
