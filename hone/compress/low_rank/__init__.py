"""Low-rank techniques: two thin factors in place of a weight, or beside what a quantizer made of it. One file each."""
