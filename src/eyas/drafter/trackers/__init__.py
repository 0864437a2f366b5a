"""Other programs' views of a training run, fed from its metrics file."""
