"""A folder for ``PYTHONPATH`` from which an engine loads ``eyas_engine`` and nothing else of eyas.

The engine lives in a Python environment of its own. Putting eyas' whole environment on its path would
shadow the engine's libraries, so the package is copied, with the metadata that an entry point needs.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from eyas import __version__
from eyas.base.errors import TargetError
from eyas.base.files import write_atomic

_PACKAGE = "eyas_engine"


def make_plugin_folder(folder: Path) -> Path:
    """Bring ``folder`` up to date; files that are as they should be are left as they are.

    Raises:
        TargetError: this installation lacks the package.
        OSError: the folder cannot be written.
    """
    specification = find_spec(_PACKAGE)
    if specification is None or not specification.submodule_search_locations:
        raise TargetError(
            "the package that engines load is not installed", where=_PACKAGE, hint="install eyas again"
        )
    source = Path(specification.submodule_search_locations[0])
    wanted = {f"{_PACKAGE}/{path.name}": path.read_text("utf-8") for path in sorted(source.glob("*.py"))}
    information = f"eyas_engine-{__version__}.dist-info"
    wanted[f"{information}/METADATA"] = f"Metadata-Version: 2.1\nName: eyas-engine\nVersion: {__version__}\n"
    wanted[f"{information}/entry_points.txt"] = (
        "[sglang.srt.plugins]\neyas = eyas_engine.sglang_plugin:load\n"
    )
    for stale in folder.glob("eyas_engine-*.dist-info") if folder.is_dir() else []:
        if stale.name != information:
            shutil.rmtree(stale)  # two versions would load the plugin twice
    for name, text in wanted.items():
        path = folder / name
        if not path.is_file() or path.read_text("utf-8") != text:
            write_atomic(path, text)
    for path in (folder / _PACKAGE).glob("*.py"):
        if f"{_PACKAGE}/{path.name}" not in wanted:
            path.unlink()
    return folder
