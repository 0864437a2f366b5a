"""Floor 6: checks, findings, remedies, the plan of todos and its executor."""
