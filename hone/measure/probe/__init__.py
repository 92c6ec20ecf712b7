"""The memory hierarchy of this machine, measured: latency and bandwidth of every level, links between devices, the disk."""
