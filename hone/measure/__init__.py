"""Description of this machine, and measurements of a piece of work: time, memory, energy."""
