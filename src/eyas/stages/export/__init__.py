"""Stage export: a checkpoint that engines load."""
