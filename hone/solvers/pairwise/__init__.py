"""One option for every item where the losses of two items depend on each other: exact, greedy, drawn at random, annealed, and by a simulated quantum circuit."""
