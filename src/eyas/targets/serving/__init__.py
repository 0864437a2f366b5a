"""Servers of an engine: started, proven, watched and stopped; nothing here knows of stages."""
