"""Where the optimizer and the float32 master weights of a training are: on the device, or in the host's memory."""
