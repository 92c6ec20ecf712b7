"""From a train stage's spec to the numbers that `hone.cost.train` computes its estimates from."""
