"""Floor 3: where tokens and states come from."""
