"""Money: what training and serving cost, what an optimization earns, how often to save, and machines that may be taken away."""
