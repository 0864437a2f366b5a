"""Floor 3: checkpoint layouts that engines load, and their inspection."""
