"""Products of linears on hardware that is simulated: analog memory, optics, spiking neurons."""
