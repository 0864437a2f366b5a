"""One training step, the same in eyas, in its peers and in plain form."""
