"""Edits of an engine's source: applied by diff, verified by hash before and after, restored.

The original is kept in the project before the engine's file is touched, and a file is only ever
replaced whole. A file with neither of the two declared hashes has drifted (an upgrade, another edit)
and is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.base.checked import require_check, with_check
from eyas.base.clock import utc_now_text
from eyas.base.errors import ConfigError, DamageFound, TargetError
from eyas.base.files import fsync_folder, read_json, temporary_name, write_atomic, write_json
from eyas.config.servers import PatchConfig, ServeConfig
from eyas.targets.serving.unified_diff import DiffDoesNotApply, apply_diff

PatchState = Literal["applied", "not applied", "drifted", "missing"]

_FIND = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec(sys.argv[1])
places = list(spec.submodule_search_locations or []) if spec else []
names = importlib.metadata.packages_distributions().get(sys.argv[1], [])
print(json.dumps({"folder": places[0] if places else None,
                  "version": importlib.metadata.version(names[0]) if names else "unknown"}))
"""


@dataclass(frozen=True)
class PatchView:
    """Where a patch stands.

    Args:
        path: the engine's file; None when package or file is not there.
        version: of the package that holds it.
        sha256: of the file as it is.
        applied_at: when eyas applied it, and with which version, if it did.
    """

    name: str
    state: PatchState
    path: str | None
    version: str
    sha256: str | None
    applied_at: str | None
    applied_version: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Patches:
    """The declared patches of a project.

    Args:
        serve: the table that declares them and names the engine's Python.
        root: the project folder, for relative paths of diffs.
        kept: folder for originals.
    """

    def __init__(self, serve: ServeConfig, root: Path, kept: Path) -> None:
        self._serve, self._root, self._kept = serve, root, kept
        places = [(patch.package, patch.file) for patch in serve.patches]
        if len(set(places)) < len(places):
            raise ConfigError(
                "two patches of one file", where="serve.patches", hint="merge them into one diff"
            )

    def names(self) -> list[str]:
        return [patch.name for patch in self._serve.patches]

    def look(self, name: str) -> PatchView:
        """Where a patch stands; changes nothing. Raises ConfigError for an unknown name."""
        patch = self._patch(name)
        path, version = self._find(patch)
        record = self._record(name)
        digest = _sha256(path) if path is not None else None
        states: dict[str | None, PatchState] = {
            patch.sha256_before: "not applied",
            patch.sha256_after: "applied",
            None: "missing",
        }
        return PatchView(
            name,
            states.get(digest, "drifted"),
            None if path is None else str(path),
            version,
            digest,
            record.get("at"),
            record.get("version"),
        )

    def apply(self, name: str) -> PatchView:
        """Apply a patch; one that is applied stays as it is.

        Raises:
            ConfigError: the diff does not give what it declares.
            TargetError: the file is missing or has drifted.
            OSError: the file cannot be written; it is unchanged.
        """
        patch, view = self._patch(name), self.look(name)
        if view.state == "applied":
            return view
        path = self._require(patch, view, "not applied")
        original = path.read_bytes()
        diff_path = (self._root / Path(patch.diff).expanduser()).resolve()
        try:
            patched = apply_diff(original.decode("utf-8"), diff_path.read_text("utf-8")).encode()
        except (OSError, UnicodeDecodeError, DiffDoesNotApply) as error:
            raise ConfigError(
                f"the diff of patch {name} cannot be applied", where=diff_path, why=str(error)
            ) from error
        if hashlib.sha256(patched).hexdigest() != patch.sha256_after:
            raise ConfigError(
                f"patch {name} gives another file than it declares",
                where=diff_path,
                why=f"its SHA-256 is {hashlib.sha256(patched).hexdigest()}, declared is {patch.sha256_after}",
                hint="nothing was changed; correct serve.patches.sha256_after if the diff is right",
            )
        folder = self._kept / name
        write_atomic(folder / "original", original)
        record = {"path": str(path), "version": view.version, "at": utc_now_text()}
        write_json(folder / "record.json", with_check(record | {"sha256": patch.sha256_before}))
        _replace(path, patched)
        return self._verified(name, "applied")

    def restore(self, name: str) -> PatchView:
        """Put the original back; one that is not applied stays as it is.

        Raises:
            TargetError: the file is missing or has drifted.
            DamageFound: the kept original is not what was kept.
            OSError: the file cannot be written; it is unchanged.
        """
        patch, view = self._patch(name), self.look(name)
        if view.state == "not applied":
            return view
        path = self._require(patch, view, "applied")
        kept = self._kept / name / "original"
        if not kept.is_file() or _sha256(kept) != patch.sha256_before:
            raise DamageFound(
                f"the kept original of patch {name} is missing or damaged",
                where=kept,
                why=f"its SHA-256 has to be {patch.sha256_before}",
                hint=f"install {patch.package} {view.applied_version or view.version} again",
            )
        _replace(path, kept.read_bytes())
        return self._verified(name, "not applied")

    def _verified(self, name: str, wanted: PatchState) -> PatchView:
        view = self.look(name)
        if view.state != wanted:
            raise DamageFound(
                f"patch {name} is {view.state} after it was to be {wanted}",
                where=view.path,
                why=f"its SHA-256 is {view.sha256}",
            )
        return view

    def _patch(self, name: str) -> PatchConfig:
        for patch in self._serve.patches:
            if patch.name == name:
                return patch
        known = ", ".join(self.names()) or "none is declared"
        raise ConfigError(f"there is no patch {name!r}", where="serve.patches", hint=f"known: {known}")

    def _require(self, patch: PatchConfig, view: PatchView, wanted: PatchState) -> Path:
        if view.state == wanted and view.path is not None:
            return Path(view.path)
        if view.state == "missing":
            raise TargetError(
                f"patch {patch.name} has no file to change",
                where=f"{patch.package}/{patch.file}",
                why=f"not found by {self._python}",
                hint="set serve.python to the Python of the engine's environment",
            )
        since = f"; eyas applied the patch to version {view.applied_version}" if view.applied_version else ""
        raise TargetError(
            f"the file of patch {patch.name} has drifted",
            where=view.path,
            why=f"{patch.package} is version {view.version} now and the file's SHA-256 is {view.sha256}, "
            f"neither {patch.sha256_before} (before) nor {patch.sha256_after} (after){since}",
            hint="make the diff anew for this version, and declare its hashes; the file was left alone",
        )

    @property
    def _python(self) -> str:
        return self._serve.python or sys.executable

    def _find(self, patch: PatchConfig) -> tuple[Path | None, str]:
        try:
            found = subprocess.run(
                [self._python, "-c", _FIND, patch.package],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            table = json.loads(found.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise TargetError(
                "the engine's Python cannot be asked",
                where=self._python,
                why=str(error),
                hint="set serve.python",
            ) from error
        if table["folder"] is None:
            return None, "not installed"
        folder = Path(table["folder"])
        path = (folder / patch.file).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ConfigError(f"patch {patch.name} leaves its package", where="serve.patches", why=patch.file)
        return (path if path.is_file() else None), str(table["version"])

    def _record(self, name: str) -> dict[str, Any]:
        try:
            return require_check(read_json(self._kept / name / "record.json"))
        except (OSError, ValueError):
            return {}  # it only says when; the hashes decide


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Replace a file whole, keeping its permissions; other names of the old file keep the old content."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o7777)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
