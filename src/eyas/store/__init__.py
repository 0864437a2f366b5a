"""Floor 2: samples, segments, the ledger and the scrub; no torch."""
