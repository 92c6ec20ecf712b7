"""Going on from a trained model: what a finished training keeps, and what the next one reads of it."""
