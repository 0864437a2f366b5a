"""eyas trains EAGLE-3 draft models through a pipeline that may be killed anywhere and loses nothing."""

__version__ = "0.1.0"
