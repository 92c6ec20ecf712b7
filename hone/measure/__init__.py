"""What this machine is and what a piece of work took: time, memory, energy."""
