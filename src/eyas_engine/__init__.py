"""What eyas loads into the processes of an inference engine, to dump hidden states.

It lives in the engine's own Python environment, so it imports nothing of eyas: only the standard
library, torch, and the engine itself. Nothing here may end an engine: every entry point that the
engine calls catches all errors and reports them to the client instead.
"""

PROTOCOL = 1
"""Version of the wire between eyas and a server; in every reply and every dump."""
