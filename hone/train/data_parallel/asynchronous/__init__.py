"""Asynchronous data parallelism: a sharded parameter server (BSP, SSP, ASP) and gossip, over TCP connections of their own."""
