"""Floor 6: view models from the project folder."""
