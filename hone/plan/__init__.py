"""Plans across rooms: what a goal (a size, a latency) needs of the stages below, found by their own estimates."""
