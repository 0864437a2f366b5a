"""plotly's own script, as its Python package bundles it."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

from eyas.base.errors import UsageError


@lru_cache(maxsize=1)
def plotly_script() -> str:
    """The minified script, read from the package's data: importing plotly itself would take seconds.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        return (files("plotly.package_data") / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise UsageError("plotly's script is not there", why=str(error), hint="pip install plotly") from error
