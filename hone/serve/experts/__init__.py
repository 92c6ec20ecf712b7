"""Where the weights of experts are while a model is served: on which rank, in how many copies, on the device or on the host."""
