"""Stage prepare: conversations in, prompts or samples out."""
