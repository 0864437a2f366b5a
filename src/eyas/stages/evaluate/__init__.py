"""Stage evaluate: speculative decoding on held-out prompts."""
