"""The side towards the network: connections with limits, TLS, requests of browsers."""
