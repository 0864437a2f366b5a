"""Floor 5: order of the stages, resume, the lock and signals."""
