"""How each kind of finding is mended and verified; nothing is deleted, nothing killed by a broad name."""
