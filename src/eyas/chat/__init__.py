"""Floor 2: conversations in, token ids and spans out; no torch."""
