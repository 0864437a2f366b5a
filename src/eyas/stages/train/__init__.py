"""Stage train: a drafter from the store."""
