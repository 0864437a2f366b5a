"""Floor 2: conversations in, token ids and spans out; tokenizers are handed in, no torch needed."""
