"""What keeps a pickle from being read, in words for a person."""

from __future__ import annotations

import pickle


def why_unreadable(error: Exception) -> str:
    """One line of an error that torch raises for a file, without its advice to read the file without care."""
    met = error.__context__ if isinstance(error.__context__, pickle.UnpicklingError) else error
    lines = str(met).partition(" Please use")[0].strip().splitlines()
    why = lines[0] if lines else type(error).__name__
    return f"it is not what torch.save writes ({why})" if isinstance(error, pickle.UnpicklingError) else why
