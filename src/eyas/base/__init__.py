"""Floor 0: errors, atomic files, seals, units and the clock; standard library only."""
