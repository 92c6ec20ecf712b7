"""What passes between processes: messages, tallies that are summed, token events, the fronts that share a port."""
