"""Floor 7: words in, words out; the only place that prints."""
