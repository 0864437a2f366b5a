"""Files that a reboot wiped, brought back by hash; the target's weights, hashed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base.errors import DamageFound
from eyas.base.files import fsync_folder, set_aside, temporary_name
from eyas.base.seal import file_digest
from eyas.config.resolve import model_folder
from eyas.recovery.bench import Bench, Proof, Way
from eyas.recovery.findings import Finding
from eyas.stages.records import recorded_capture_recipe
from eyas.targets.fingerprint import weights_fingerprint


@dataclass(frozen=True)
class RestoreFile:
    """Copies a needed file from its declared source; another file in its place is set aside."""

    finding: Finding

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("copy it from its source, by hash", lambda: self._copy(bench))]

    def _copy(self, bench: Bench) -> str:
        detail = self.finding.detail
        path, source = Path(str(detail["path"])), Path(str(detail["source"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        with open(source, "rb") as original, open(temporary, "wb") as copy:
            while block := original.read(8 << 20):
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
            os.fchmod(copy.fileno(), os.fstat(original.fileno()).st_mode & 0o777)
        if file_digest(temporary) != detail["sha256"]:
            temporary.unlink()
            raise DamageFound("the source changed while it was copied", where=source)
        if path.exists():
            set_aside(path, bench.scene.layout.set_aside, self.finding.what)
        os.replace(temporary, path)
        fsync_folder(path.parent)
        return f"copied from {source}"

    def proof(self, bench: Bench) -> Proof:
        path, wanted = Path(str(self.finding.detail["path"])), str(self.finding.detail["sha256"])
        found = file_digest(path) if path.is_file() else "missing"
        return Proof(found == wanted, f"{path}: {found[:16]}, wanted {wanted[:16]}")


@dataclass
class HashWeights:
    """Every byte of the target's weights against what the states were captured with."""

    _found: str | None = field(default=None)

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("hash every weight file", lambda: self._hash(bench))]

    def _hash(self, bench: Bench) -> str:
        folder = model_folder(bench.scene.project.config, bench.scene.layout.root)
        self._found = weights_fingerprint(folder, None).hash
        return "done"

    def proof(self, bench: Bench) -> Proof:
        recorded = (recorded_capture_recipe(bench.scene.project) or {}).get("target_fingerprint")
        if self._found is None:
            return Proof(False, "not hashed yet")
        if recorded is None:
            return Proof(True, f"fingerprint {self._found}; nothing is captured yet")
        if self._found == recorded:
            return Proof(True, f"fingerprint {recorded}, as when states were captured")
        return Proof(False, f"fingerprint {self._found}, states were captured with {recorded}")
