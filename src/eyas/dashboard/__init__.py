"""Floor 7: a read-only local web page over the view models."""
