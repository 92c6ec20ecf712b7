"""What this machine is made of: NUMA nodes, cores, caches, devices and limits; and where work is placed on it."""
