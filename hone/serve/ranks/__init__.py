"""One engine on several processes: rank 0 schedules and sends every step to the others, which run it on their part of the model."""
