"""One module per verb (or family of verbs), loaded when it is called."""
