"""Floor 2: run a command here, over ssh, or through a chain of ways; what a machine says of itself."""
